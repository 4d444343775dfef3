//! A repair writes bitmaps for background snapshots, and refuses other images.

use sterna_image::ImageError;
use sterna_image::tools::repair::{RepairTo, repair};
use sterna_image::tools::verify::{VerifyOptions, verify};

use super::sample::{Plan, Sample};

fn snapshot() -> Sample {
    Plan { has_end: false, has_bitmaps: false, ..Plan::default() }.build()
}

fn into(path: std::path::PathBuf) -> RepairTo {
    RepairTo::File { path, replace: false }
}

#[test]
fn repair_background_snapshot_gives_it_the_bitmaps_it_would_have_had() {
    let (broken, right) = (snapshot(), Plan { has_end: false, ..Plan::default() }.build());
    let directory = tempfile::tempdir().unwrap();
    let (image, mended) = (directory.path().join("image"), directory.path().join("mended"));
    std::fs::write(&image, &broken.bytes).unwrap();

    let repaired = repair(&image, &into(mended.clone()), &VerifyOptions::default()).unwrap();

    assert!(std::fs::read(&mended).unwrap() == right.bytes);
    assert!(std::fs::read(&image).unwrap() == broken.bytes, "the image is left alone");
    assert_eq!(repaired.bitmaps, 4);
    assert!(verify(&mended, &VerifyOptions::default()).unwrap().is_sound());
    let again = repair(&mended, &RepairTo::Itself, &VerifyOptions::default()).unwrap_err();
    assert!(matches!(again, ImageError::Request(_)), "{again}");
}

#[test]
fn repair_in_place_that_was_broken_off_is_finished() {
    let (broken, right) = (snapshot(), Plan { has_end: false, ..Plan::default() }.build());
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let first = &broken.blocks[0];
    let bytes = broken.edited(|bytes, _| {
        let bitmap = first.bitmap..first.bitmap + 10;
        bytes[bitmap.clone()].copy_from_slice(&right.bytes[bitmap]);
    });
    std::fs::write(&image, bytes).unwrap();

    repair(&image, &RepairTo::Itself, &VerifyOptions::default()).unwrap();

    assert!(std::fs::read(&image).unwrap() == right.bytes);
}

#[test]
fn repair_anything_else_is_refused_with_the_reason_and_writes_nothing() {
    let lost = Plan { has_bitmaps: false, ..Plan::default() }.build();
    let cut = snapshot();
    for (bytes, word) in [
        (Plan::default().build().bytes, "sound"),
        (lost.bytes.clone(), "no bit is set"),
        (lost.bytes[..lost.part].to_vec(), "cancelled"),
        (cut.bytes[..cut.eof - 2].to_vec(), "truncated"),
        (cut.edited(|bytes, s| bytes[s.blocks[1].header + 3] = 7), "version 7"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (image, mended) = (directory.path().join("image"), directory.path().join("mended"));
        std::fs::write(&image, &bytes).unwrap();

        let error = repair(&image, &into(mended), &VerifyOptions::default()).unwrap_err().to_string();
        let in_place = repair(&image, &RepairTo::Itself, &VerifyOptions::default());

        assert!(error.contains(word), "{word}: {error}");
        assert!(in_place.is_err());
        assert!(std::fs::read(&image).unwrap() == bytes);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "{word}");
    }
}

#[test]
fn repair_into_a_file_that_is_there_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (image, there) = (directory.path().join("image"), directory.path().join("there"));
    std::fs::write(&image, snapshot().bytes).unwrap();
    std::fs::write(&there, "precious").unwrap();

    assert!(repair(&image, &into(there.clone()), &VerifyOptions::default()).is_err());

    assert_eq!(std::fs::read(&there).unwrap(), b"precious");
}
