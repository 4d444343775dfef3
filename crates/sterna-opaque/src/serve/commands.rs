//! Selects the commands of an image that its destinations receive.
//!
//! An image keeps the commands of the stream from which it was made. For example, a save with dirty bitmaps
//! begins with POSTCOPY_ADVISE. The serving side sends the commands of postcopy itself (specs/postcopy.md §2),
//! and a QEMU fails when such a command is repeated. Therefore all sections of an image are sent, but only one
//! of its commands, SWITCHOVER_START.

use sterna::UnusableImage;
use sterna_image::Shape;
use sterna_image::tools::description::Description;
use sterna_image::tools::sections::{ShapeWalk, Stop, Walk};

/// Commands that the serving side sends itself: OPEN_RETURN_PATH, PING, POSTCOPY_ADVISE.
const REPLACED: [u16; 3] = [1, 2, 3];
/// SWITCHOVER_START: devices load it, and the serving side does not send it itself.
const KEPT: u16 = 11;

/// Returns the shape of `image`, which must have footers, without the commands that the serving side sends.
///
/// # Errors
/// It contains a command of a postcopy that had begun, or its sections cannot be separated.
pub(super) fn served(shape: &Shape, image: &str) -> Result<Shape, UnusableImage> {
    let description = shape.description.as_ref().and_then(|text| Description::parse(text).ok());
    let walk = ShapeWalk::of(shape, description.as_ref());
    let before_devices =
        [(&walk.early, "before RAM"), (&walk.setup, "at RAM's start"), (&walk.between, "beside RAM")];
    if let Some((flaw, place)) = before_devices.iter().find_map(|(walk, place)| Some((lost(walk)?, place))) {
        return Err(UnusableImage::Sections { image: image.to_owned(), place, flaw });
    }
    let mut served = shape.clone();
    let sections = |bytes: &[u8], walk: &Walk| {
        sections(bytes, walk)
            .map_err(|number| UnusableImage::PostcopyHadBegun { image: image.to_owned(), number })
    };
    served.early = sections(&shape.early, &walk.early)?;
    served.setup = sections(&shape.setup, &walk.setup)?;
    served.between = sections(&shape.between, &walk.between)?;
    // An operator may have damaged devices served. Bytes that the walk does not understand stay unchanged.
    served.devices = sections(&shape.devices, &walk.devices)?;
    Ok(served)
}

/// The reason why the walk ended before the end of its bytes.
fn lost(walk: &Walk) -> Option<String> {
    if walk.stop == Stop::Whole {
        return None;
    }
    let flaw = walk.flaws.iter().rev().find(|flaw| !flaw.in_description);
    Some(flaw.map_or_else(|| "an end of the stream stands there".to_owned(), |flaw| flaw.what.clone()))
}

/// Returns `bytes`, over which `walk` has run, without the replaced commands; or the number of a command of a postcopy
/// that had begun.
fn sections(bytes: &[u8], walk: &Walk) -> Result<Vec<u8>, u16> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    for command in &walk.commands {
        let end = command.body().end;
        if REPLACED.contains(&command.number) {
            out.extend_from_slice(&bytes[at..command.offset]);
            at = end;
        } else if command.number != KEPT {
            return Err(command.number);
        }
    }
    out.extend_from_slice(&bytes[at..]);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use sterna_image::RamShape;

    use super::*;

    const ADVISE: &[u8] = &[8, 0, 3, 0, 0];
    const SWITCHOVER: &[u8] = &[8, 0, 11, 0, 0];
    /// START of a section that is sent in parallel with RAM, a PART of it, and a FULL section whose body looks
    /// like a command.
    const START: &[u8] = b"\x01\0\0\0\x09\x01b\0\0\0\0\0\0\0\x01x\x7e\0\0\0\x09";
    const PART: &[u8] = b"\x02\0\0\0\x09y\x7e\0\0\0\x09";
    const FULL: &[u8] = b"\x04\0\0\0\x0b\x01c\0\0\0\0\0\0\0\x01\x08\0\x03\0\0\x7e\0\0\0\x0b";

    fn shape() -> Shape {
        let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
        shape.ram = RamShape { section_id: 2, blocks: Vec::new(), footers: true };
        shape
    }

    #[test]
    fn served_drops_the_commands_that_the_serving_side_gives_and_keeps_every_section() {
        let mut image = shape();
        image.early = [&[8, 0, 1, 0, 0][..], &[8, 0, 2, 0, 4, 0, 0, 0, 1], ADVISE].concat();
        image.setup = START.to_vec();
        image.between = [PART, ADVISE, SWITCHOVER, PART].concat();
        image.devices = [ADVISE, FULL, &[8, 0, 2, 0, 4, 0, 0, 0, 3]].concat();

        let served = served(&image, "vm.img").unwrap();

        assert_eq!(served.early, b"");
        assert_eq!(served.setup, START);
        assert_eq!(served.between, [PART, SWITCHOVER, PART].concat());
        assert_eq!(served.devices, FULL);
    }

    #[test]
    fn served_without_commands_is_the_image_byte_for_byte() {
        let mut image = shape();
        image.setup = START.to_vec();
        image.between = [PART, SWITCHOVER].concat();
        image.devices = FULL.to_vec();

        assert_eq!(served(&image, "vm.img").unwrap(), image);
    }

    #[test]
    fn served_of_a_postcopy_that_had_begun_is_refused_by_the_command() {
        for number in [4u8, 5, 6, 7, 9, 10] {
            let mut image = shape();
            image.between = [SWITCHOVER, &[8, 0, number, 0, 2, 1, 1]].concat();

            let refused = served(&image, "vm.img").unwrap_err();

            let UnusableImage::PostcopyHadBegun { number: named, .. } = refused else { panic!("{refused}") };
            assert_eq!(named, u16::from(number));
        }
    }

    #[test]
    fn served_sections_that_cannot_be_told_apart_are_refused_and_damaged_devices_stay() {
        let mut image = shape();
        image.early = vec![FULL[0], 0, 0];
        let refused = served(&image, "vm.img").unwrap_err();
        assert!(matches!(refused, UnusableImage::Sections { place: "before RAM", .. }), "{refused}");
        image.early.clear();
        image.devices = [ADVISE, FULL, &[0x55, 1, 2]].concat();

        let served = served(&image, "vm.img").unwrap();

        assert_eq!(served.devices, [FULL, &[0x55, 1, 2]].concat());
    }
}
