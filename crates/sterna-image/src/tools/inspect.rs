//! What an image is, without looking at its pages.
//!
//! Of a mapped-ram image only the head, the bitmaps and the tail are read, however much RAM it has. A legacy stream
//! has no index: it is read to its end, and [`Inspection::was_streamed`] says so.

use serde::Serialize;

use super::coverage::Coverage;
use super::memory_map::Split;
use super::state::State;
use crate::ImageError;
use crate::model::{Compression, Container, Form, LibvirtHeader};
use crate::read::Image;

/// What an image is.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// Always `sterna-image`.
    pub schema: &'static str,
    /// Version of this record.
    pub version: u32,
    /// The file.
    pub file: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes that it takes on the disk; none if that is not known.
    pub allocated_bytes: Option<u64>,
    /// Kind as `sterna convert` names it.
    pub kind: String,
    /// `mapped-ram` or `legacy`.
    pub form: &'static str,
    /// How the stream is compressed, or `none`.
    #[serde(rename = "packing")]
    pub compression: &'static str,
    /// libvirt's container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtPart>,
    /// Offset of the stream in the file.
    pub stream_offset: u64,
    /// Machine type; empty if the stream does not name it.
    pub machine_type: String,
    /// Capabilities that a loader has to agree with.
    pub capabilities: Vec<String>,
    /// UUID of the machine, if the stream states it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// What the guest was doing before it was stopped for the save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_state: Option<String>,
    /// RAM of all blocks in bytes.
    pub ram_bytes: u64,
    /// Blocks in stream order.
    pub blocks: Vec<BlockPart>,
    /// Devices in stream order.
    pub devices: Vec<DevicePart>,
    /// Whether all devices are listed; else some could not be told apart, or are truncated.
    pub is_told_apart: bool,
    /// Length of the devices' sections in bytes.
    pub devices_bytes: u64,
    /// Length of the description in bytes; none if there is none.
    pub description_bytes: Option<u64>,
    /// Numbers of the commands between RAM's sections; 11 tells that the guest was stopped.
    pub commands: Vec<u16>,
    /// Whether RAM's END is there; background snapshots lack it.
    pub has_end: bool,
    /// Whether the stream is whole up to its EOF.
    pub has_eof: bool,
    /// Whether nobody can tell if the stream is whole: no footers, no description.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_end_unsure: bool,
    /// Bytes behind the stream, which mean nothing.
    pub trailing_bytes: u64,
    /// How much of the machine's RAM lies below 4 GiB of physical addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// Processors whose registers can be told.
    pub processors: usize,
    /// Whether the whole file had to be read for this.
    pub was_streamed: bool,
}

/// libvirt's part.
#[derive(Debug, Clone, Serialize)]
pub struct LibvirtPart {
    /// Version of the header.
    pub version: u32,
    /// Name of the format.
    pub format: String,
    /// Whether libvirt starts the guest after a restore.
    pub was_running: bool,
    /// Name of the domain, if the XML tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Length of the XML in bytes.
    pub xml_bytes: u64,
    /// Length of the cookie in bytes, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cookie_bytes: Option<u64>,
    /// How long an XML the file has room for, in bytes.
    pub xml_room_bytes: u64,
}

/// A block.
#[derive(Debug, Clone, Serialize)]
pub struct BlockPart {
    /// Its name.
    pub name: String,
    /// Its used length in bytes.
    pub length_bytes: u64,
    /// Its pages.
    pub pages: u64,
    /// Pages with data.
    pub data_pages: u64,
    /// Pages of zeros.
    pub zero_pages: u64,
    /// Pages that are not in the image: shared memory, or not plugged in.
    pub absent_pages: u64,
    /// Whether the block is left out because it is shared memory.
    pub is_skipped: bool,
    /// Where the file has the block's bitmap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmap_offset: Option<u64>,
    /// Where the file has its page 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_offset: Option<u64>,
    /// Address that the stream states (with `x-ignore-shared`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DevicePart {
    /// Its name.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Version of its state.
    pub version: u32,
    /// Number of its section.
    pub section: u32,
    /// Length of its state in bytes.
    pub bytes: u64,
    /// Whether the description tells its fields.
    pub is_described: bool,
    /// Whether it is loaded before RAM.
    pub is_early: bool,
    /// Whether it sends its state bit by bit beside RAM (START, PARTs, END).
    pub is_live: bool,
}

/// Looks at `image`; `coverage` is what [`Coverage::of`] gave for it.
///
/// # Errors
/// [`ImageError::Io`].
pub fn inspect(image: &Image, coverage: &Coverage) -> Result<Inspection, ImageError> {
    let (shape, kind) = (image.shape(), image.kind());
    let state = State::of(image);
    let file_bytes =
        image.source().len_bytes().map_err(|error| ImageError::io(image.path_name(), "fstat", error))?;
    Ok(Inspection {
        schema: "sterna-image",
        version: 1,
        file: image.path_name().to_owned(),
        file_bytes,
        allocated_bytes: allocated(image),
        kind: kind.name(),
        form: if kind.form == Form::Mapped { "mapped-ram" } else { "legacy" },
        compression: if kind.compression == Compression::None { "none" } else { kind.compression.name() },
        libvirt: match &kind.container {
            Container::Libvirt(header) => Some(libvirt(header, kind.name())),
            Container::Bare => None,
        },
        stream_offset: image.stream_offset(),
        machine_type: shape.configuration.machine_type.clone(),
        capabilities: shape.configuration.capabilities.clone(),
        uuid: shape.configuration.uuid.map(|bytes| uuid::Uuid::from_bytes(bytes).to_string()),
        run_state: state.run_state(),
        ram_bytes: shape.ram_bytes(),
        blocks: blocks(image, coverage),
        devices: devices(&state),
        is_told_apart: state.is_whole,
        devices_bytes: shape.devices.len() as u64,
        description_bytes: shape.description.as_ref().map(|text| text.len() as u64),
        commands: state.commands.iter().map(|(number, _)| *number).collect(),
        has_end: shape.has_end,
        has_eof: shape.has_eof,
        is_end_unsure: image.is_end_unsure(),
        trailing_bytes: image.trailing_bytes(),
        split: state.memory_map(&[], None).split,
        processors: state.registers().map_or(0, |registers| registers.len()),
        was_streamed: kind.form == Form::Legacy,
    })
}

fn allocated(image: &Image) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(image.source().file()?.metadata().ok()?.blocks() * 512)
}

fn blocks(image: &Image, coverage: &Coverage) -> Vec<BlockPart> {
    let places = image.mapped().map(|mapped| mapped.blocks());
    let shape = image.shape().ram.blocks.iter().zip(&coverage.blocks).enumerate();
    shape
        .map(|(index, (block, pages))| {
            let place = places.and_then(|places| places.get(index)).filter(|place| !place.is_skipped);
            BlockPart {
                name: block.name.clone(),
                length_bytes: block.length_bytes,
                pages: pages.pages,
                data_pages: pages.data_pages(),
                zero_pages: pages.came_pages() - pages.data_pages(),
                absent_pages: pages.pages - pages.came_pages(),
                is_skipped: block.is_skipped,
                bitmap_offset: place.map(|place| place.bitmap_offset),
                pages_offset: place.map(|place| place.pages_offset),
                address: block.address,
            }
        })
        .collect()
}

fn devices(state: &State<'_>) -> Vec<DevicePart> {
    let part = |section: &super::state::Section<'_>| DevicePart {
        name: section.header.name.clone(),
        instance: section.header.instance,
        version: section.header.version,
        section: section.header.id,
        bytes: section.body.len() as u64,
        is_described: section.header.described.is_some(),
        is_early: section.is_early,
        is_live: false,
    };
    let live = |live: &super::state::Live<'_>| DevicePart {
        name: live.header.name.clone(),
        instance: live.header.instance,
        version: live.header.version,
        section: live.header.id,
        bytes: live.bytes(),
        is_described: false,
        is_early: false,
        is_live: true,
    };
    state.sections.iter().map(part).chain(state.live.iter().map(live)).collect()
}

fn libvirt(header: &LibvirtHeader, kind: String) -> LibvirtPart {
    let xml = String::from_utf8_lossy(&header.xml);
    let domain = xml.split_once("<name>").and_then(|(_, rest)| rest.split_once("</name>"));
    let cookie = header.cookie.as_ref().map(|cookie| cookie.len() as u64);
    LibvirtPart {
        version: header.version,
        format: kind.strip_prefix("libvirt-").unwrap_or(&kind).to_owned(),
        was_running: header.was_running != 0,
        domain: domain.map(|(name, _)| name.to_owned()),
        xml_bytes: header.xml.len() as u64,
        cookie_bytes: cookie,
        xml_room_bytes: u64::from(header.data_length).saturating_sub(cookie.map_or(0, |bytes| bytes + 1) + 1),
    }
}
