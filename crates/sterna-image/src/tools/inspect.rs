//! Describes an image without its page contents.
//!
//! For a mapped-ram image, only the head, the bitmaps and the tail are read, whatever the size of its RAM. A legacy
//! stream has no index. It is read to its end, and [`Inspection::was_streamed`] is true.

use serde::Serialize;
use sterna_store::StoredImage;

use super::coverage::Coverage;
use super::memory_map::Split;
use super::state::State;
use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::LibvirtHeader;
use crate::read::Image;
use crate::read::framed::STREAM;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// The description of an image, as `sterna inspect` reports it.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// Name of this record's schema, always `sterna-image`.
    pub schema: &'static str,
    /// Version of this record's schema.
    pub version: u32,
    /// Path or name of the file.
    pub file: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes that the file occupies on the disk; none if unknown.
    pub allocated_bytes: Option<u64>,
    /// Format, as `sterna convert` names it.
    pub kind: String,
    /// Form of the stream: `mapped-ram` or `legacy`.
    pub form: &'static str,
    /// Compression of the stream, or `none`.
    #[serde(rename = "packing")]
    pub compression: &'static str,
    /// Content of libvirt's container; none for a bare image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtPart>,
    /// Offset of the stream in the file, in bytes.
    pub stream_offset: u64,
    /// Machine type; empty if the stream does not name it.
    pub machine_type: String,
    /// Capabilities that a loader must match.
    pub capabilities: Vec<String>,
    /// UUID of the machine, if the stream contains it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Run state of the guest before it was stopped for the save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_state: Option<String>,
    /// Length of all RAM blocks in bytes.
    pub ram_bytes: u64,
    /// RAM blocks in stream order.
    pub blocks: Vec<BlockPart>,
    /// Devices in stream order.
    pub devices: Vec<DevicePart>,
    /// Whether all devices are listed. Otherwise some could not be separated, or are truncated.
    pub is_told_apart: bool,
    /// Length of the devices' sections in bytes.
    pub devices_bytes: u64,
    /// Length of the description in bytes; none if there is none.
    pub description_bytes: Option<u64>,
    /// Numbers of the commands between RAM's sections; 11 means that the guest was stopped.
    pub commands: Vec<u16>,
    /// Whether the stream has RAM's END section; background snapshots lack it.
    pub has_end: bool,
    /// Whether the stream is complete up to its EOF.
    pub has_eof: bool,
    /// Whether the end of the stream is unknown: it has neither footers nor a description.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_end_unsure: bool,
    /// Bytes after the stream, which have no meaning.
    pub trailing_bytes: u64,
    /// The part of the machine's RAM below 4 GiB of physical addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// Number of processors whose registers can be read.
    pub processors: usize,
    /// Whether the inspection had to read the whole file.
    pub was_streamed: bool,
    /// The frames of an image in Sterna's own format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames: Option<FramesPart>,
}

/// The frames of an image in Sterna's own format. The offsets of its blocks are those of its view.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct FramesPart {
    /// Digest of the image, which names it as a base.
    pub digest: String,
    /// Bytes of an extent.
    pub extent_bytes: u32,
    /// Number of frames of the image itself.
    pub frames: u32,
    /// Bytes of these frames.
    pub frame_bytes: u64,
    /// Pages of RAM that the image itself holds.
    pub held_pages: u64,
    /// Whether the image is encrypted.
    pub is_encrypted: bool,
    /// Seconds since 1970 when the image was made.
    pub made: u64,
    /// Number of layers, including the image itself.
    pub layers: usize,
    /// Digest of the base; none for a complete image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Ranges of pages in the recorded working set; 0 if none was recorded.
    pub working_set_ranges: usize,
    /// Bytes of these ranges.
    pub working_set_bytes: u64,
    /// Whether the image can write the stream again that it was made from, byte for byte.
    pub has_stream: bool,
}

/// The content of libvirt's container.
#[derive(Debug, Clone, Serialize)]
pub struct LibvirtPart {
    /// Version of the header.
    pub version: u32,
    /// Name of the format, as libvirt spells it.
    pub format: String,
    /// Whether libvirt starts the guest after a restore.
    pub was_running: bool,
    /// Name of the domain, if the XML contains it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Length of the XML in bytes.
    pub xml_bytes: u64,
    /// Length of the cookie in bytes; none without a cookie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cookie_bytes: Option<u64>,
    /// Room for an XML in the file, in bytes.
    pub xml_room_bytes: u64,
}

/// A RAM block of the image.
#[derive(Debug, Clone, Serialize)]
pub struct BlockPart {
    /// Name of the block.
    pub name: String,
    /// Used length in bytes.
    pub length_bytes: u64,
    /// Number of pages in the block.
    pub pages: u64,
    /// Number of pages with data.
    pub data_pages: u64,
    /// Number of zero pages.
    pub zero_pages: u64,
    /// Number of pages that are not in the image: shared memory, or not plugged in.
    pub absent_pages: u64,
    /// Whether the block is left out because it is shared memory.
    pub is_skipped: bool,
    /// File offset of the bitmap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmap_offset: Option<u64>,
    /// File offset of page 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_offset: Option<u64>,
    /// Guest physical address, if the stream contains it (`x-ignore-shared`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

/// A device of the image.
#[derive(Debug, Clone, Serialize)]
pub struct DevicePart {
    /// Name of the section.
    pub name: String,
    /// Instance number of the section.
    pub instance: u32,
    /// Version of the device's state.
    pub version: u32,
    /// Number of the section in the stream.
    pub section: u32,
    /// Length of the device's state in bytes.
    pub bytes: u64,
    /// Whether the description names the fields of the state.
    pub is_described: bool,
    /// Whether the state is loaded before RAM.
    pub is_early: bool,
    /// Whether the device sends its state in parts between RAM's sections (START, PARTs, END).
    pub is_live: bool,
}

/// Describes `image`; `coverage` is the result of [`Coverage::of`] for the same image.
///
/// # Errors
/// [`ImageError::Io`] if the file's length cannot be read.
pub fn inspect(image: &Image, coverage: &Coverage) -> Result<Inspection, ImageError> {
    let (shape, format) = (image.shape(), image.format());
    let state = State::of(image);
    let file_bytes = match image.stored() {
        Some(stored) => stored.stored_bytes(),
        None => {
            let length = image.source().len_bytes();
            length.map_err(|error| ImageError::io(image.path_name(), "fstat", error))?
        }
    };
    Ok(Inspection {
        schema: "sterna-image",
        version: 1,
        file: image.path_name().to_owned(),
        file_bytes,
        allocated_bytes: allocated(image),
        kind: format.to_string(),
        form: format.form().name(),
        compression: if format.is_compressed() { format.compression().name() } else { "none" },
        libvirt: image.libvirt_header().map(libvirt),
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
        was_streamed: format.form() == Form::Legacy,
        frames: image.stored().map(|stored| frames(stored)),
    })
}

fn frames(stored: &StoredImage) -> FramesPart {
    FramesPart {
        digest: stored.digest().to_string(),
        extent_bytes: stored.extent_bytes(),
        frames: stored.frames(),
        frame_bytes: stored.frame_bytes(),
        held_pages: stored.held_pages(),
        is_encrypted: stored.is_encrypted(),
        made: stored.made(),
        layers: stored.layers(),
        base: stored.named_base().map(|(digest, _)| digest.to_string()),
        working_set_ranges: stored.working_set().len(),
        working_set_bytes: stored.working_set().iter().map(|range| u64::from(range.count) * PAGE_BYTES).sum(),
        has_stream: stored.files().iter().any(|file| file.name == STREAM),
    }
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

fn libvirt(header: &LibvirtHeader) -> LibvirtPart {
    let format = Format::of_number(header.format).unwrap_or(Format::LibvirtRaw);
    let xml = String::from_utf8_lossy(&header.xml);
    let domain = xml.split_once("<name>").and_then(|(_, rest)| rest.split_once("</name>"));
    let cookie = header.cookie.as_ref().map(|cookie| cookie.len() as u64);
    LibvirtPart {
        version: header.version,
        format: format.word().to_owned(),
        was_running: header.was_running != 0,
        domain: domain.map(|(name, _)| name.to_owned()),
        xml_bytes: header.xml.len() as u64,
        cookie_bytes: cookie,
        xml_room_bytes: u64::from(header.data_length).saturating_sub(cookie.map_or(0, |bytes| bytes + 1) + 1),
    }
}
