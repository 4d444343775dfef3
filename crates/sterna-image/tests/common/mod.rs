//! Files of a real QEMU 11.1.3, from sterna-wire's golden vectors, and small generated images.
#![allow(dead_code)]

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use sterna_image::{BlockShape, Image, ImageError, LegacyWriter, PageVisitor, RamShape, Shape};
use sterna_wire::PAGE_SIZE;
use sterna_wire::main::{Configuration, SectionHeader, encode_footer};

pub fn vector(name: &str) -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna-wire/tests/vectors").join(format!("{name}.gz"));
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// An image of a real QEMU with less RAM and with [`stand_in`] pages. All other bytes are QEMU's.
///
/// The pages are replaced because they contain firmware, which this project may not copy.
pub fn cut_down(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(format!("{name}.gz"));
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The replacement for page `page` with data in block `name` of a [`cut_down`] image.
pub fn stand_in(name: &str, page: u64) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| (at as u64 * (page + 3) + at as u64 / 256 * 7 + 13 * name.len() as u64) as u8)
}

pub fn open(bytes: &[u8]) -> Result<Image, ImageError> {
    Image::open_source(Arc::new(bytes.to_vec()), "small")
}

pub fn section(id: u32, name: &str, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    SectionHeader { id, name, instance: 0, version: 1 }.encode_full(&mut out).unwrap();
    out.extend_from_slice(body);
    encode_footer(id, &mut out);
    out
}

/// A machine with every part of a shape. Its two blocks have three and two pages.
pub fn machine() -> Shape {
    let block = |name: &str, pages: u64| BlockShape {
        name: name.to_owned(),
        length_bytes: pages * PAGE_SIZE as u64,
        address: None,
        host_page_bytes: None,
        is_skipped: false,
    };
    // Bodies that contain bytes like a footer, like RAM's START, and like EOF with a description.
    let early = section(7, "0000:00:02.0/early", b"body \x7e\0\0\0\x07 \x7e\0\0\0\x01\x01\0\0\0\x05\x03ram");
    let device = section(9, "cpu", b"registers \x7e\0\0\0\x09\x08 \0\x06\0\0\0\x02{} end");
    let devices = [device, section(10, "apic", &[0; 40])].concat();
    let description = br#"{"configuration": {"vmsd_name": "configuration", "version": 1, "fields": [{"name": "len", "type": "uint32", "size": 4}, {"name": "name", "type": "buffer", "size": 4}]}, "page_size": 4096, "devices": []}"#;
    Shape {
        configuration: Configuration { machine_type: "none".to_owned(), ..Configuration::default() },
        has_configuration: true,
        early,
        ram: RamShape { section_id: 5, blocks: vec![block("m0", 3), block("rom", 2)], footers: true },
        setup: Vec::new(),
        between: vec![8, 0, 11, 0, 0],
        has_end: true,
        devices,
        has_eof: true,
        description: Some(description.to_vec()),
    }
}

/// Content of page `page` of block `block` of the machine. Every second page is zero.
pub fn content(block: usize, page: u64) -> [u8; PAGE_SIZE] {
    let mut content = [0; PAGE_SIZE];
    if page.is_multiple_of(2) {
        for (at, byte) in content.iter_mut().enumerate() {
            *byte = (at as u64 * (page + 3) + 7 * block as u64) as u8;
        }
    }
    content
}

/// Passes all pages of a shape, with the content of [`content`], to a visitor.
pub fn give(shape: &Shape, to: &mut dyn PageVisitor) -> Result<(), ImageError> {
    for (index, block) in shape.ram.blocks.iter().enumerate().filter(|(_, block)| !block.is_skipped) {
        for page in 0..block.length_bytes / PAGE_SIZE as u64 {
            match content(index, page) {
                zero if zero == [0; PAGE_SIZE] => to.zero(index, page, 1)?,
                page_content => to.pages(index, page, &page_content)?,
            }
        }
    }
    Ok(())
}

/// The machine as a legacy stream.
pub fn legacy(shape: &Shape) -> Vec<u8> {
    let mut writer = LegacyWriter::new(Vec::new(), "memory", shape).unwrap();
    give(shape, &mut writer).unwrap();
    writer.finish(shape).unwrap()
}

/// RAM, block by block, as a visitor receives it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Ram(pub Vec<Vec<u8>>);

impl Ram {
    /// Memory that was not written: filled with `0xaa`.
    pub fn of(shape: &Shape) -> Self {
        Self(shape.ram.blocks.iter().map(|block| vec![0xaa; block.length_bytes as usize]).collect())
    }

    pub fn read(image: &Image) -> Result<Self, ImageError> {
        let mut ram = Self::of(image.shape());
        image.visit_pages(&mut ram)?;
        Ok(ram)
    }
}

impl PageVisitor for Ram {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        let start = first as usize * PAGE_SIZE;
        self.0[block][start..start + content.len()].copy_from_slice(content);
        Ok(())
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        let start = first as usize * PAGE_SIZE;
        self.0[block][start..start + count as usize * PAGE_SIZE].fill(0);
        Ok(())
    }
}
