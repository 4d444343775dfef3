//! Files of a real QEMU 11.1.3, opened: every byte has its place, and RAM comes out byte for byte.

use std::sync::Arc;

use crate::common::vector;
use sterna_image::{Container, Form, Image, ImageError, Packing, PageVisitor};
use sterna_wire::PAGE_SIZE;

/// RAM as a flat piece of memory.
struct Flat(Vec<u8>);

impl PageVisitor for Flat {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        assert_eq!(block, 0);
        let start = first as usize * PAGE_SIZE;
        self.0[start..start + content.len()].copy_from_slice(content);
        Ok(())
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        assert_eq!(block, 0);
        let start = first as usize * PAGE_SIZE;
        self.0[start..start + count as usize * PAGE_SIZE].fill(0);
        Ok(())
    }
}

fn open(name: &str) -> Image {
    Image::open_source(Arc::new(vector(name)), name).unwrap()
}

#[test]
fn open_mapped_file_of_qemu_gives_shape_and_ram() {
    let image = open("file-mapped-ram");
    let ram = vector("guest.ram");

    assert_eq!((image.kind().form, image.kind().packing), (Form::Mapped, Packing::None));
    assert_eq!(image.kind().container, Container::Bare);
    assert_eq!(image.kind().name(), "mapped-ram");
    let shape = image.shape();
    assert!(shape.has_capability("mapped-ram") && shape.has_end && shape.has_eof && shape.ram.footers);
    assert_eq!(shape.between, [8, 0, 11, 0, 0]);
    assert_eq!(image.trailing_bytes(), 0);
    assert!(shape.description.as_ref().unwrap().starts_with(b"{"));
    let mut seen = Flat(vec![0xaa; ram.len()]);
    image.visit_pages(&mut seen).unwrap();
    assert!(seen.0 == ram);
    let mut random = vec![0xaa; ram.len()];
    image.mapped().unwrap().read(0, 0, &mut random).unwrap();
    assert!(random == ram);
}

#[test]
fn open_legacy_file_of_qemu_gives_shape_and_ram() {
    let image = open("file-legacy");
    let ram = vector("guest.ram");

    assert_eq!(image.kind().name(), "legacy");
    let shape = image.shape();
    assert!(
        shape.has_end && shape.has_eof && shape.ram.footers && shape.configuration.capabilities.is_empty()
    );
    let mapped = open("file-mapped-ram");
    assert_eq!(shape.devices.len(), mapped.shape().devices.len());
    let mut seen = Flat(vec![0xaa; ram.len()]);
    image.visit_pages(&mut seen).unwrap();
    assert!(seen.0 == ram);
}
