//! Writes seeds for four fuzz targets, from a file of a real QEMU.
//!
//! The targets are `image`, `image_tools`, `libvirt_header` and `unpack`.
//!
//! `cargo run -p sterna-image --example image-seeds -- fuzz/seeds` (the directory is the argument). The file is from
//! the golden vectors. Its RAM is cut to a few pages, so that a seed is short. libvirt's containers lack the room for
//! longer texts, because it would be most of a seed.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Compression, Format, Image, ImageError, LegacyWriter, PageVisitor};
use sterna_wire::PAGE_SIZE;
use sterna_wire::libvirt::{ByteOrder, SaveHeader, VERSION};
use sterna_wire::main::{SectionHeader, encode_footer, encode_section_part};

type Failure = Box<dyn std::error::Error>;

/// Pages that a seed contains.
const PAGES: u64 = 3;
/// Selects compression in the first byte of an `unpack` seed; number of bytes to compress.
const COMPRESSES: u8 = 0b0011_1000;
const PLAIN_BYTES: usize = 600;
const XML: &[u8] = b"<domain type='qemu'></domain>\0";
const COOKIE: &[u8] = b"<cookie/>\0";

fn main() -> Result<(), Failure> {
    let directory = PathBuf::from(std::env::args().nth(1).ok_or("give the directory to write to")?);
    let scratch = tempfile::tempdir()?;
    let (small, contained) = (scratch.path().join("small"), scratch.path().join("contained"));
    let legacy = small_legacy()?;
    fs::write(&small, &legacy)?;
    let beside = beside_ram(&legacy)?;
    put(&directory, "image", "beside-ram", &beside)?;
    put(&directory, "image_tools", "beside-ram", &beside)?;
    fs::write(&contained, in_container(&legacy))?;
    for &target in Format::ALL {
        let options = ConvertOptions {
            target: Some(target),
            alignment: PAGE_SIZE as u64,
            threads: 1,
            ..ConvertOptions::default()
        };
        let file = scratch.path().join(target.name());
        // A conversion keeps the texts of a container, and their room. The contained source has no such room.
        let input = if target.is_libvirt() { &contained } else { &small };
        convert(Input::File(input.clone()), Output::File(file.clone()), &options)?;
        let bytes = fs::read(&file)?;
        put(&directory, "image", target.name(), &bytes)?;
        put(&directory, "image_tools", target.name(), &bytes)?;
        if target.is_libvirt() {
            put(&directory, "libvirt_header", target.name(), &bytes[..92])?;
        }
        if let Some(choice) = choice(target) {
            put(&directory, "unpack", target.name(), &[&[choice], &bytes[..]].concat())?;
            let plain = [&[choice | COMPRESSES], &legacy[..PLAIN_BYTES]].concat();
            put(&directory, "unpack", &format!("{}-plain", target.name()), &plain)?;
        }
    }
    Ok(())
}

fn put(directory: &Path, target: &str, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(directory.join(target))?;
    fs::write(directory.join(target).join(name), bytes)
}

/// The machine of `stream` with sections of other live devices.
///
/// virtio-mem in QEMU 10.0 and dirty bitmaps have such sections.
fn beside_ram(stream: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut shape = Image::open_source(Arc::new(stream.to_vec()), "beside RAM")?.shape().clone();
    let (live, early) = (900, 901);
    let name = "dirty-bitmap";
    SectionHeader { id: live, name, instance: 0, version: 1 }.encode_start(&mut shape.setup)?;
    shape.setup.extend_from_slice(b"first");
    encode_footer(live, &mut shape.setup);
    let name = "0000:00:02.0/virtio-mem-device-early";
    SectionHeader { id: early, name, instance: 0, version: 1 }.encode_full(&mut shape.setup)?;
    shape.setup.extend_from_slice(&[7; 20]);
    encode_footer(early, &mut shape.setup);
    let part = |is_last: bool, body: u8| {
        let mut section = Vec::new();
        encode_section_part(live, is_last, &mut section);
        section.push(body);
        encode_footer(live, &mut section);
        section
    };
    shape.between = [part(false, 1), shape.between].concat();
    shape.devices = [part(true, 2), shape.devices].concat();
    // The description does not match the devices any more.
    shape.description = None;
    let mut writer = LegacyWriter::new(Vec::new(), "beside RAM", &shape)?;
    for (index, block) in shape.ram.blocks.iter().enumerate() {
        writer.zero(index, 0, block.length_bytes / PAGE_SIZE as u64)?;
    }
    Ok(writer.finish(&shape)?)
}

/// A libvirt save image without room after its texts.
fn in_container(stream: &[u8]) -> Vec<u8> {
    let header = SaveHeader {
        is_complete: true,
        byte_order: ByteOrder::Little,
        version: VERSION,
        data_length: (XML.len() + COOKIE.len()) as u32,
        was_running: 1,
        format: 0,
        cookie_offset: XML.len() as u32,
    };
    let mut out = Vec::new();
    header.encode(&mut out);
    [&out, XML, COOKIE, stream].concat()
}

/// The first byte of a seed of `unpack`; none for other formats.
fn choice(target: Format) -> Option<u8> {
    let is_bare = !target.is_libvirt();
    Compression::all().position(|packed| is_bare && packed == target.compression()).map(|at| at as u8)
}

/// The golden file's machine with a few pages of RAM.
fn small_legacy() -> Result<Vec<u8>, Failure> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna-wire/tests/vectors/file-legacy.gz");
    let mut golden = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path)?).read_to_end(&mut golden)?;
    let image = Image::open_source(Arc::new(golden), "file-legacy")?;
    let mut shape = image.shape().clone();
    shape.ram.blocks[0].length_bytes = PAGES * PAGE_SIZE as u64;
    let mut writer = LegacyWriter::new(Vec::new(), "seed", &shape)?;
    image.visit_pages(&mut First(&mut writer))?;
    Ok(writer.finish(&shape)?)
}

/// Passes only the first pages of each block.
struct First<'a>(&'a mut dyn PageVisitor);

impl PageVisitor for First<'_> {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        if first < PAGES { self.0.pages(block, first, content) } else { Ok(()) }
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        if first < PAGES { self.0.zero(block, first, count) } else { Ok(()) }
    }
}
