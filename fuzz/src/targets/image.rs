//! A whole image in memory: opened, its pages visited and read at random, written as a legacy stream and read
//! again.

use std::sync::Arc;

use sterna_image::{Form, Format, Image, ImageError, LegacyWriter, PageVisitor, Shape};
use sterna_wire::PAGE_SIZE;

/// Images with more RAM than this, in bytes, are not read.
const MOST_BYTES: u64 = 1 << 20;

/// Contents of RAM, block by block. Callers request only ranges inside it.
#[derive(PartialEq, Eq)]
struct Ram(Vec<Vec<u8>>);

impl Ram {
    fn of(shape: &Shape) -> Self {
        Self(shape.ram.blocks.iter().map(|block| vec![0; block.length_bytes as usize]).collect())
    }
}

impl PageVisitor for Ram {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        assert!(!content.is_empty() && content.len().is_multiple_of(PAGE_SIZE));
        self.0[block][first as usize * PAGE_SIZE..][..content.len()].copy_from_slice(content);
        Ok(())
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        assert!(count > 0);
        self.0[block][first as usize * PAGE_SIZE..][..count as usize * PAGE_SIZE].fill(0);
        Ok(())
    }
}

fn give(ram: &Ram, to: &mut dyn PageVisitor) {
    for (block, bytes) in ram.0.iter().enumerate() {
        for (page, content) in bytes.chunks(PAGE_SIZE).enumerate() {
            to.pages(block, page as u64, content).unwrap();
        }
    }
}

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let image = match Image::open_source(Arc::new(data.to_vec()), "fuzz") {
        Ok(image) => image,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let shape = image.shape();
    assert!(shape.early.len() + shape.setup.len() + shape.between.len() + shape.devices.len() <= 64 << 20);
    let _ = (shape.run_state(), image.format().name());
    if shape.ram_bytes() > MOST_BYTES {
        return;
    }
    let mut ram = Ram::of(shape);
    if image.visit_pages(&mut ram).is_err() {
        // Opening an image already walks its records. Only differences can make the visit fail, and frames whose digest is wrong.
        assert!(image.has_deltas() || image.format() == Format::Sterna);
        return;
    }
    if let Some(mapped) = image.mapped() {
        for (index, block) in mapped.blocks().iter().enumerate() {
            let mut bytes = vec![0xaa; block.length_bytes as usize];
            mapped.read(index, 0, &mut bytes).unwrap();
            assert!(bytes == ram.0[index]);
        }
    }
    // A block without records may be skipped, or may have no plugged memory. The rewritten image has records
    // for every block.
    let is_plain = shape.ram.blocks.iter().all(|block| !block.is_skipped);
    if is_plain && shape.has_eof && shape.ram.footers {
        let mut writer = LegacyWriter::new(Vec::new(), "again", shape).unwrap();
        give(&ram, &mut writer);
        let bytes = writer.finish(shape).unwrap();
        let again = Image::open_source(Arc::new(bytes), "again").unwrap();
        assert!(*again.shape() == shape.for_form(Form::Legacy));
        let mut same = Ram::of(again.shape());
        again.visit_pages(&mut same).unwrap();
        assert!(same == ram);
    }
}
