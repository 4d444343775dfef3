//! Opens files of real QEMUs (11.1.3 and 10.0) and compares their RAM byte for byte.

use std::sync::Arc;

use crate::common::{Ram, cut_down, stand_in, vector};
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::diff::{DiffOptions, diff};
use sterna_image::tools::inspect::inspect;
use sterna_image::tools::verify::{VerifyOptions, verify_source};
use sterna_image::{Form, Format, Image, ImageError, PageVisitor};
use sterna_wire::PAGE_SIZE;

/// RAM as one contiguous range of memory.
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

    assert_eq!(image.format(), Format::MappedRam);
    assert_eq!(image.libvirt_header(), None);
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

    assert_eq!(image.format().name(), "legacy");
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

/// Images of real QEMUs with live sections: name, devices in the description, live devices.
const BESIDE: [(&str, usize, usize); 2] =
    [("qemu10-virtio-mem-legacy", 33, 0), ("dirty-bitmaps-legacy", 32, 1)];

fn open_cut_down(name: &str) -> Image {
    Image::open_source(Arc::new(cut_down(name)), name).unwrap()
}

/// Checks that every page is zero or its [`stand_in`]. Returns the number of pages with data.
fn check_ram(image: &Image) -> usize {
    let ram = Ram::read(image).unwrap();
    let mut data = 0;
    for (block, bytes) in image.shape().ram.blocks.iter().zip(&ram.0) {
        for (page, content) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
            // A legacy stream does not contain pages that are not plugged in.
            let is_nothing =
                content.iter().all(|byte| *byte == 0) || content.iter().all(|byte| *byte == 0xaa);
            if !is_nothing {
                assert!(content == stand_in(&block.name, page as u64), "{} page {page}", block.name);
                data += 1;
            }
        }
    }
    data
}

#[test]
fn ram_ends_at_its_end_whatever_stands_beside_it() {
    for (name, devices, live) in BESIDE {
        let image = open_cut_down(name);
        let shape = image.shape();

        assert!(shape.has_end && shape.has_eof && shape.early.len() < 100, "{name}");
        assert!(!shape.setup.is_empty(), "{name}");
        assert!(check_ram(&image) > 50, "{name}: {}", check_ram(&image));
        let verdict =
            verify_source(Arc::new(cut_down(name)), name, &VerifyOptions { threads: 1, digest: false })
                .unwrap();
        assert!(verdict.is_sound(), "{name}: {:?}", verdict.findings);
        let inspection = inspect(&image, &Coverage::of(&image).unwrap()).unwrap();
        assert!(inspection.is_told_apart, "{name}");
        assert_eq!(inspection.devices.iter().filter(|device| !device.is_live).count(), devices, "{name}");
        assert_eq!(inspection.devices.iter().filter(|device| device.is_live).count(), live, "{name}");
        assert!(inspection.devices.iter().all(|device| device.is_described || device.is_live), "{name}");
    }
}

#[test]
fn conversion_of_what_stands_beside_ram_keeps_it_byte_for_byte_and_in_its_place() {
    for (name, ..) in BESIDE {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("a"), cut_down(name)).unwrap();
        for (from, to, kind) in [("a", "b", "mapped-ram"), ("b", "c", "legacy"), ("c", "d", "legacy-zstd")] {
            let options =
                ConvertOptions { target: Some(kind.parse::<Format>().unwrap()), ..Default::default() };
            convert(Input::File(path(from)), Output::File(path(to)), &options).unwrap();
        }
        let images = ["a", "b", "c", "d"].map(|name| Image::open(&path(name)).unwrap());
        let data = check_ram(&images[0]);
        for image in &images[1..] {
            let (ours, theirs) = (images[0].shape(), image.shape().for_form(Form::Legacy));
            assert!(ours.setup == theirs.setup && ours.between == theirs.between, "{name}");
            assert!(ours.devices == theirs.devices && ours.early == theirs.early, "{name}");
            assert_eq!(check_ram(image), data, "{name}");
            let difference = diff(&images[0], image, directory.path(), &DiffOptions::default()).unwrap();
            assert!(difference.is_same(), "{name}: {difference:?}");
            let source = Arc::clone(image.source());
            let verdict = verify_source(source, name, &VerifyOptions { threads: 1, digest: false }).unwrap();
            assert!(verdict.is_sound(), "{name}: {:?}", verdict.findings);
        }
    }
}
