//! Contents of an image besides pages, and images that are not served.

use super::*;
use sterna::UnusableImage;

/// A save with dirty bitmaps has ADVISE, a section with parts between RAM's, and its END after RAM's.
#[test]
fn image_with_commands_of_its_own_is_served_with_one_advice_and_every_section() {
    const PART: &[u8] = b"\x02\0\0\0\x09bits\x7e\0\0\0\x09";
    const END: &[u8] = b"\x03\0\0\0\x09done\x7e\0\0\0\x09";
    let directory = tempfile::tempdir().unwrap();
    let mut shape = shape();
    shape.early = vec![8, 0, 3, 0, 0];
    shape.setup = b"\x01\0\0\0\x09\x0cdirty-bitmap\0\0\0\0\0\0\0\x01name\x7e\0\0\0\x09".to_vec();
    shape.between = [&shape.between[..], PART].concat();
    shape.devices = [END, &shape.devices].concat();
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    give(&mut writer);
    let path = directory.path().join("bitmaps");
    std::fs::write(&path, writer.finish(&shape).unwrap()).unwrap();
    let (serving, play) = serve(&open(&path), options());

    let destination = play.next();
    let opening = destination.until(&[8, 0, 2, 0, 4, 0, 0, 0, 0x10]);
    [1, 0x10].into_iter().for_each(|ping| destination.say(&ReturnMessage::Pong(ping)));
    let behind = destination.until(&[8, 0, 2, 0, 4, 0, 0, 0, 2]);
    let packaged = destination.bytes(9);
    let package = destination.bytes(u32::from_be_bytes(packaged[5..].try_into().unwrap()) as usize);
    [2, 3, 0x42].into_iter().for_each(|ping| destination.say(&ReturnMessage::Pong(ping)));
    destination.finish();

    serving.wait().unwrap();
    let count = |bytes: &[u8], of: &[u8]| bytes.windows(of.len()).filter(|at| *at == of).count();
    assert_eq!(
        (count(&opening, &[8, 0, 3, 0, 16]), count(&opening, &[8, 0, 3, 0, 0])),
        (1, 0),
        "{opening:x?}"
    );
    assert_eq!((count(&opening, &shape.setup), count(&behind, PART)), (1, 1));
    assert!(package[5..].starts_with(&shape.devices), "{package:x?}");
}

#[test]
fn images_that_cannot_be_served_are_refused_with_the_cure() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    let mut shape = shape();
    shape.configuration.capabilities.push("x-ignore-shared".into());
    shape.ram.blocks.iter_mut().for_each(|block| block.address = Some(0));
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    give(&mut writer);
    std::fs::write(&path, writer.finish(&shape).unwrap()).unwrap();

    let refused = ServedImage::open(&path, &ImageOptions::default()).err().unwrap();

    assert!(matches!(refused, StartError::Image(UnusableImage::WithoutSharedMemory { .. })), "{refused}");
}

#[test]
fn image_of_a_machine_on_huge_pages_is_not_served() {
    for page_bytes in [2 << 20, 1 << 30] {
        let directory = tempfile::tempdir().unwrap();
        let mut shape = shape();
        shape.ram.blocks[0].host_page_bytes = Some(page_bytes);
        let path = directory.path().join("legacy");
        let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
        give(&mut writer);
        std::fs::write(&path, writer.finish(&shape).unwrap()).unwrap();

        let refused = ServedImage::open(&path, &ImageOptions::default()).err().expect("it is refused");

        let StartError::Image(UnusableImage::HugePages { block, .. }) = &refused else { panic!("{refused}") };
        assert_eq!(block, "m0");
    }
}
