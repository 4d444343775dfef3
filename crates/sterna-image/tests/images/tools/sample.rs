//! A small mapped-ram image, built from specs/mapped-ram.md without Sterna's writers.
//!
//! An error in a writer can therefore not hide the same error in a reader.

use std::sync::Arc;

use sterna_image::tools::verify::{Verdict, VerifyOptions, verify_source};
use sterna_image::{Image, ImageError};

pub const PAGE: usize = 4096;

/// The properties of a sample.
#[derive(Clone)]
pub struct Plan {
    pub machine: &'static str,
    pub capabilities: Vec<&'static str>,
    pub uuid: Option<[u8; 16]>,
    pub blocks: Vec<(&'static str, usize)>,
    /// Bytes before the stream.
    pub front: Vec<u8>,
    /// Blocks that are shared memory and left out; with `x-ignore-shared`.
    pub shared: Vec<&'static str>,
    pub has_end: bool,
    pub has_bitmaps: bool,
    /// Bodies of devices, by name.
    pub devices: Vec<(&'static str, Vec<u8>)>,
    pub description: Option<String>,
}

/// File offsets of a block's parts.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Offset of the entry's first byte.
    pub entry: usize,
    /// Offset of the mapped-ram header.
    pub header: usize,
    pub bitmap: usize,
    pub pages: usize,
    pub count: usize,
}

#[derive(Clone)]
pub struct Sample {
    pub bytes: Vec<u8>,
    pub blocks: Vec<Placed>,
    /// Offset of the word MEM_SIZE.
    pub total: usize,
    /// Offset of the first PART of RAM.
    pub part: usize,
    /// Offset of the first device section.
    pub devices: usize,
    /// Offset of the EOF byte.
    pub eof: usize,
}

impl Default for Plan {
    fn default() -> Self {
        let trap = b"\x7e\0\0\0\x05\x04\0\0\0\x06\x01b and more";
        let devices = vec![("timer", vec![7; 24]), ("trap", trap.to_vec()), ("globalstate", global_state())];
        let description = describe(&devices, &["mapped-ram"]);
        Self {
            machine: "pc-i440fx-11.1",
            capabilities: vec!["mapped-ram"],
            uuid: None,
            blocks: vec![("pc.ram", 150), ("/rom@etc/acpi/tables", 32), ("pc.bios", 64), ("one", 1)],
            front: Vec::new(),
            shared: Vec::new(),
            has_end: true,
            has_bitmaps: true,
            devices,
            description: Some(description),
        }
    }
}

/// Whether a page of the sample has data.
pub fn holds(block: usize, page: usize) -> bool {
    (page * 5 + block).is_multiple_of(3) || (page / 8).is_multiple_of(3)
}

/// The byte that fills a page with data.
pub fn fill(block: usize, page: usize) -> u8 {
    (1 + (block * 31 + page) % 255) as u8
}

impl Plan {
    pub fn build(&self) -> Sample {
        let mut out = self.front.clone();
        out.extend(b"QEVM\0\0\0\x03\x07");
        out.extend((self.machine.len() as u32).to_be_bytes());
        out.extend(self.machine.as_bytes());
        if !self.capabilities.is_empty() {
            subsection(&mut out, "configuration/capabilities");
            out.extend((self.capabilities.len() as u32).to_be_bytes());
            self.capabilities.iter().for_each(|name| text(&mut out, name));
        }
        if let Some(uuid) = &self.uuid {
            subsection(&mut out, "configuration/uuid");
            out.extend(uuid);
        }
        out.extend(b"\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04");
        let total = out.len();
        let pages: usize = self.blocks.iter().map(|block| block.1).sum();
        out.extend(((pages * PAGE) as u64 | 4).to_be_bytes());
        let mut blocks = Vec::new();
        for (index, (name, count)) in self.blocks.iter().enumerate() {
            blocks.push(self.block(&mut out, index, name, *count));
        }
        out.extend(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
        let part = out.len();
        out.extend(b"\x02\0\0\0\x01\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
        if self.has_end {
            out.extend(b"\x08\0\x0b\0\0\x03\0\0\0\x01\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
        }
        let devices = out.len();
        for (index, (name, body)) in self.devices.iter().enumerate() {
            let id = (index as u32 + 4).to_be_bytes();
            out.push(4);
            out.extend(id);
            text(&mut out, name);
            out.extend([0, 0, 0, 0, 0, 0, 0, 1]);
            out.extend(body);
            out.push(0x7e);
            out.extend(id);
        }
        let eof = out.len();
        out.push(0);
        if let Some(description) = &self.description {
            out.push(6);
            out.extend((description.len() as u32).to_be_bytes());
            out.extend(description.as_bytes());
        }
        Sample { bytes: out, blocks, total, part, devices, eof }
    }

    fn block(&self, out: &mut Vec<u8>, index: usize, name: &str, count: usize) -> Placed {
        let entry = out.len();
        text(out, name);
        out.extend(((count * PAGE) as u64).to_be_bytes());
        if self.capabilities.contains(&"x-ignore-shared") {
            out.extend([0; 8]);
        }
        let header = out.len();
        if self.shared.contains(&name) {
            out.extend(b"\0\0\0\x01\0\0\0\0\0\0\x10\0");
            out.extend([0; 16]);
            return Placed { entry, header, bitmap: 0, pages: 0, count: 0 };
        }
        let bitmap = header + 28;
        let bitmap_bytes = count.div_ceil(64) * 8;
        let pages = (bitmap + bitmap_bytes).next_multiple_of(PAGE);
        out.extend(1u32.to_be_bytes());
        out.extend((PAGE as u64).to_be_bytes());
        out.extend((bitmap as u64).to_be_bytes());
        out.extend((pages as u64).to_be_bytes());
        out.resize(pages + count * PAGE, 0);
        for page in (0..count).filter(|page| holds(index, *page)) {
            if self.has_bitmaps {
                out[bitmap + page / 8] |= 1 << (page % 8);
            }
            out[pages + page * PAGE..pages + (page + 1) * PAGE].fill(fill(index, page));
        }
        Placed { entry, header, bitmap, pages, count }
    }
}

impl Sample {
    /// A copy of the sample's bytes after `edit`.
    pub fn edited(&self, edit: impl Fn(&mut Vec<u8>, &Sample)) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        edit(&mut bytes, self);
        bytes
    }

    /// The first page that the image contains, or with `false` does not contain.
    pub fn page(&self, block: usize, held: bool) -> usize {
        (0..self.blocks[block].count).find(|page| holds(block, *page) == held).unwrap()
    }

    pub fn page_range(&self, block: usize, page: usize) -> std::ops::Range<usize> {
        let start = self.blocks[block].pages + page * PAGE;
        start..start + PAGE
    }
}

pub fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

pub fn get64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// QEMU's description of devices that consist of one buffer each.
pub fn describe(devices: &[(&str, Vec<u8>)], capabilities: &[&str]) -> String {
    let field = |name: &str, size: usize| serde_json::json!({"name": name, "type": "buffer", "size": size});
    let devices: Vec<_> = devices
        .iter()
        .map(|(name, body)| {
            serde_json::json!({"name": name, "instance_id": 0, "vmsd_name": name, "version": 1,
                "fields": [field("first", 1), field("rest", body.len() - 1)]})
        })
        .collect();
    let mut configuration = serde_json::json!({"vmsd_name": "configuration", "version": 1,
        "fields": [field("len", 4), field("name", 14)]});
    if let [capability] = capabilities {
        configuration["subsections"] = serde_json::json!([{"vmsd_name": "configuration/capabilities", "version": 1,
            "fields": [field("caps_count", 4), field("capabilities", 1 + capability.len())]}]);
    }
    serde_json::json!({"configuration": configuration, "page_size": 4096, "devices": devices}).to_string()
}

pub fn verdict(bytes: Vec<u8>) -> Verdict {
    try_verdict(bytes).unwrap()
}

pub fn try_verdict(bytes: Vec<u8>) -> Result<Verdict, ImageError> {
    verify_source(Arc::new(bytes), "sample", &VerifyOptions { threads: 1, digest: false })
}

pub fn open(bytes: Vec<u8>) -> Image {
    Image::open_source(Arc::new(bytes), "sample").unwrap()
}

fn global_state() -> Vec<u8> {
    let mut body = vec![0; 104];
    body[..12].copy_from_slice(b"\0\0\0\x08running\0");
    body
}

fn subsection(out: &mut Vec<u8>, name: &str) {
    out.push(5);
    text(out, name);
    out.extend([0, 0, 0, 1]);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(text.len() as u8);
    out.extend(text.as_bytes());
}
