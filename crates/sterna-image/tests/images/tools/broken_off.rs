//! An interrupted repair in place leaves an image that is refused or complete.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use sterna_image::tools::repair::{Medium, RepairTo, repair, repair_onto};
use sterna_image::tools::verify::{VerifyOptions, verify_source};
use sterna_image::{Image, ImageError};

use super::sample::{Plan, Sample};

enum Step {
    Write(u64, Vec<u8>),
    Sync,
}

/// Records writes and syncs instead of performing them.
#[derive(Default)]
struct Record(RefCell<Vec<Step>>);

impl Medium for Record {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.borrow_mut().push(Step::Write(offset, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.borrow_mut().push(Step::Sync);
        Ok(())
    }
}

/// A snapshot without bitmaps, and the expected result of its repair.
fn plans(front: &[u8]) -> (Sample, Sample) {
    let right = Plan { has_end: false, front: front.to_vec(), ..Plan::default() };
    (Plan { has_bitmaps: false, ..right.clone() }.build(), right.build())
}

fn apply(image: &mut [u8], offset: u64, bytes: &[u8]) {
    image[offset as usize..][..bytes.len()].copy_from_slice(bytes);
}

/// Calls `check` with the image in every state that a crash can leave.
///
/// A crash keeps any number of the writes since the last sync, in any order, and any number of bytes of one of them.
fn every_state(image: &[u8], steps: &[Step], mut check: impl FnMut(Vec<u8>)) {
    let mut durable = image.to_vec();
    for flight in steps.split(|step| matches!(step, Step::Sync)) {
        let writes: Vec<(u64, &[u8])> = flight
            .iter()
            .filter_map(|step| match step {
                Step::Write(offset, bytes) => Some((*offset, &bytes[..])),
                Step::Sync => None,
            })
            .collect();
        assert!(writes.len() < 8, "so many states are not tried");
        for there in 0..1u32 << writes.len() {
            let mut state = durable.clone();
            for (index, (offset, bytes)) in writes.iter().enumerate() {
                if there & 1 << index != 0 {
                    apply(&mut state, *offset, bytes);
                }
            }
            check(state.clone());
            let missing = writes.iter().enumerate().filter(|(index, _)| there & 1 << index == 0);
            for (_, (offset, bytes)) in missing {
                for cut in 1..bytes.len() {
                    let mut state = state.clone();
                    apply(&mut state, *offset, &bytes[..cut]);
                    check(state);
                }
            }
        }
        writes.iter().for_each(|(offset, bytes)| apply(&mut durable, *offset, bytes));
    }
}

fn steps_of(broken: &Sample) -> Vec<Step> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::write(&image, &broken.bytes).unwrap();
    let record = Record::default();
    repair_onto(&image, &record, &VerifyOptions::default()).unwrap();
    assert!(std::fs::read(&image).unwrap() == broken.bytes, "only the medium is written");
    record.0.into_inner()
}

/// Returns whether readers refuse the image. Otherwise checks that all pages are present.
fn is_refused(state: Vec<u8>, right: &Sample) -> bool {
    let source = Arc::new(state.clone());
    let verdict = verify_source(source.clone(), "image", &VerifyOptions::default());
    let is_sound = verdict.is_ok_and(|verdict| verdict.is_sound());
    match Image::open_source(source, "image") {
        Err(ImageError::HalfRepaired { .. }) => {
            assert!(!is_sound);
            true
        }
        Err(error) => panic!("refused for another reason: {error}"),
        Ok(image) if image.lacks_bitmaps() => {
            assert!(!is_sound);
            true
        }
        Ok(_) => {
            assert!(state == right.bytes, "taken for whole and is not");
            assert!(is_sound);
            false
        }
    }
}

#[test]
fn repair_in_place_broken_off_anywhere_is_refused_or_whole() {
    let (broken, right) = plans(&[]);
    let steps = steps_of(&broken);
    assert!(matches!(steps.last(), Some(Step::Sync)), "done when it is on the disk");

    let (mut refused, mut whole) = (0, 0);
    every_state(&broken.bytes, &steps, |state| match is_refused(state, &right) {
        true => refused += 1,
        false => whole += 1,
    });

    assert!(refused > 300 && whole > 0, "{refused} states are refused, {whole} are whole");
}

#[test]
fn repair_that_was_broken_off_is_finished_by_the_next_one() {
    let (broken, right) = plans(&[]);
    let directory = tempfile::tempdir().unwrap();
    let (image, mended) = (directory.path().join("image"), directory.path().join("mended"));
    let mut count = 0;
    every_state(&broken.bytes, &steps_of(&broken), |state| {
        count += 1;
        if count % 37 != 0 || state == right.bytes {
            return;
        }
        std::fs::write(&image, &state).unwrap();
        let to = RepairTo::File { path: mended.clone(), replace: true };
        repair(&image, &to, &VerifyOptions::default()).unwrap();
        assert!(std::fs::read(&mended).unwrap() == right.bytes, "into another file, state {count}");
        assert!(std::fs::read(&image).unwrap() == state);

        repair(&image, &RepairTo::Itself, &VerifyOptions::default()).unwrap();
        assert!(std::fs::read(&image).unwrap() == right.bytes, "state {count}");
    });
    // All bitmaps are written, but the magic is not restored.
    let mut state = right.bytes.clone();
    state[3] = b'R';
    std::fs::write(&image, &state).unwrap();
    repair(&image, &RepairTo::Itself, &VerifyOptions::default()).unwrap();
    assert!(std::fs::read(&image).unwrap() == right.bytes);
}

#[test]
fn half_repaired_image_is_told_with_the_way_out() {
    let (broken, _) = plans(&[]);
    let mut bytes = broken.bytes;
    bytes[3] = b'R';

    let error = Image::open_source(Arc::new(bytes.clone()), "a.img").unwrap_err().to_string();
    let verdict = verify_source(Arc::new(bytes), "a.img", &VerifyOptions::default()).unwrap();

    assert!(error.contains("a.img") && error.contains("sterna repair"), "{error}");
    assert!(verdict.has("half-repaired") && !verdict.has("unreadable"));
}

#[test]
fn image_with_an_end_that_bears_the_mark_of_a_repair_gets_its_magic_back_and_no_stale_page() {
    let right = Plan::default().build();
    let free = right.page(0, false);
    // Data of a page that was written and became zero later.
    let stale = right.edited(|bytes, sample| bytes[sample.page_range(0, free)].fill(9));
    let mut marked = stale.clone();
    marked[3] = b'R';
    let directory = tempfile::tempdir().unwrap();
    let (image, mended) = (directory.path().join("image"), directory.path().join("mended"));
    std::fs::write(&image, &marked).unwrap();

    let to = RepairTo::File { path: mended.clone(), replace: false };
    let copied = repair(&image, &to, &VerifyOptions::default()).unwrap();
    let repaired = repair(&image, &RepairTo::Itself, &VerifyOptions::default()).unwrap();

    assert!(std::fs::read(&image).unwrap() == stale && std::fs::read(&mended).unwrap() == stale);
    assert_eq!((repaired.pages, repaired.bitmaps, &copied), (0, 0, &repaired));
}
