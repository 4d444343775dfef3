//! Verdicts about bitmaps that do not match the pages.

use std::io::{Seek, SeekFrom, Write};
use std::sync::Arc;

use sterna_image::read::{ReadAt, Stamp};
use sterna_image::tools::finding::Severity;
use sterna_image::tools::verify::{VerifyOptions, verify, verify_source};

use super::sample::{PAGE, Plan, fill, holds, verdict};
use crate::common::vector;

#[test]
fn verify_data_under_a_clear_bit_is_a_warning_with_its_page() {
    let sample = Plan::default().build();
    let page = sample.page(0, false);
    let bytes = sample.edited(|bytes, s| bytes[s.page_range(0, page).end - 1] = 1);

    let verdict = verdict(bytes);

    assert!(verdict.is_sound() && verdict.has("stale-data"), "{:#?}", verdict.findings);
    let place = &verdict.findings[0].place;
    assert_eq!((place.block.as_deref(), place.page), (Some("pc.ram"), Some(page as u64)));
    assert_eq!(place.byte, Some(sample.page_range(0, page).start as u64));
}

#[test]
fn verify_bits_behind_the_last_page_are_a_warning() {
    let sample = Plan::default().build();
    // 150 pages: bits 22 to 63 of the third word have no meaning.
    let bytes = sample.edited(|bytes, s| bytes[s.blocks[0].bitmap + 16 + 7] = 0xf0);

    let verdict = verdict(bytes);

    assert!(verdict.is_sound() && verdict.has("bits-beyond"), "{:#?}", verdict.findings);
}

#[test]
fn verify_bitmap_of_the_other_byte_order_is_an_error() {
    let sample = Plan::default().build();
    let bytes = sample.edited(|bytes, s| {
        for word in bytes[s.blocks[0].bitmap..s.blocks[0].bitmap + 24].chunks_mut(8) {
            word.reverse();
        }
    });

    let verdict = verdict(bytes);

    assert!(!verdict.is_sound() && verdict.has("bitmap-byte-order"), "{:#?}", verdict.findings);
}

#[test]
fn verify_all_bits_set_is_a_note() {
    let sample = Plan::default().build();
    let bytes = sample.edited(|bytes, s| {
        bytes[s.blocks[2].bitmap..s.blocks[2].bitmap + 8].fill(0xff);
    });

    let verdict = verdict(bytes);

    assert!(verdict.is_sound() && verdict.has("zeros-stored"), "{:#?}", verdict.findings);
    assert_eq!(verdict.count(Severity::Warning), 0);
}

#[test]
fn verify_set_bits_over_holes_are_a_warning() {
    let sample = Plan::default().build();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(sample.bytes.len() as u64).unwrap();
    // All data except the first ten pages with data.
    let lost: Vec<usize> = (0..24).filter(|page| holds(0, *page)).take(10).collect();
    for (index, content) in sample.bytes.chunks(PAGE).enumerate() {
        let is_lost = lost.iter().any(|page| sample.page_range(0, *page).start == index * PAGE);
        if !is_lost && content.iter().any(|byte| *byte != 0) {
            file.seek(SeekFrom::Start((index * PAGE) as u64)).unwrap();
            file.write_all(content).unwrap();
        }
    }

    let verdict = verify(file.path(), &VerifyOptions::default()).unwrap();

    // A file system without holes, or with holes of more than a page, stores zeros instead.
    assert!(verdict.is_sound());
    assert!(verdict.has("set-over-hole") || verdict.has("zeros-stored"), "{:#?}", verdict.findings);
}

#[test]
fn verify_saves_without_bitmaps_are_told_apart() {
    let plan = Plan { has_bitmaps: false, ..Plan::default() };
    let lost = plan.build();
    let snapshot = Plan { has_end: false, ..plan.clone() }.build();
    let cancelled = lost.bytes[..lost.part].to_vec();
    let mut partly = snapshot.bytes.clone();
    partly[snapshot.blocks[0].bitmap] = 1;
    for (bytes, code) in [
        (lost.bytes.clone(), "bitmaps-lost"),
        (snapshot.bytes.clone(), "background-snapshot"),
        (partly, "background-snapshot"),
        (cancelled, "cancelled"),
    ] {
        let verdict = verdict(bytes);
        let errors: Vec<_> = verdict.findings.iter().filter(|f| f.severity == Severity::Error).collect();
        assert_eq!(errors.len(), 1, "{code}: {errors:#?}");
        assert_eq!(errors[0].code, code);
    }
}

#[test]
fn verify_ram_of_zeros_is_sound() {
    let sample = Plan { has_bitmaps: false, ..Plan::default() }.build();
    let bytes = sample.edited(|bytes, s| {
        for block in &s.blocks {
            bytes[block.pages..block.pages + block.count * PAGE].fill(0);
        }
    });

    let verdict = verdict(bytes);

    assert!(verdict.is_sound() && verdict.has("no-data"), "{:#?}", verdict.findings);
}

#[test]
fn verify_skipped_block_is_a_note() {
    let capabilities = vec!["x-ignore-shared", "mapped-ram"];
    let plan = Plan { capabilities, shared: vec!["pc.ram"], description: None, ..Plan::default() };

    let verdict = verdict(plan.build().bytes);

    assert!(verdict.is_sound() && verdict.has("skipped"), "{:#?}", verdict.findings);
}

/// A file that changes while it is read, or has one unreadable place.
struct Moving {
    bytes: Vec<u8>,
    unreadable: Option<u64>,
    reads: std::sync::atomic::AtomicU64,
    changes: bool,
}

impl ReadAt for Moving {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> std::io::Result<usize> {
        self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let end = offset + to.len() as u64;
        if self.unreadable.is_some_and(|bad| (offset..end).contains(&bad)) {
            return Err(std::io::Error::from_raw_os_error(5));
        }
        self.bytes.read_at(offset, to)
    }

    fn len_bytes(&self) -> std::io::Result<u64> {
        self.bytes.len_bytes()
    }

    fn stamp(&self) -> std::io::Result<Stamp> {
        // Equal stamps mean equal content. The stamp of a real file differs from the default.
        let reads = self.reads.load(std::sync::atomic::Ordering::Relaxed);
        match self.changes && reads > 3 {
            true => ReadAt::stamp(&tempfile::tempfile()?),
            false => Ok(Stamp::default()),
        }
    }
}

#[test]
fn verify_file_that_changes_meanwhile_is_an_error() {
    let bytes = Plan::default().build().bytes;
    let moving = Moving { bytes, unreadable: None, reads: 0.into(), changes: true };

    let verdict = verify_source(Arc::new(moving), "moving", &VerifyOptions::default()).unwrap();

    assert!(!verdict.is_sound() && verdict.has("changed"), "{:#?}", verdict.findings);
}

#[test]
fn verify_unreadable_page_is_named() {
    let sample = Plan::default().build();
    let page = sample.page(2, true);
    let unreadable = Some(sample.page_range(2, page).start as u64 + 100);
    let moving = Moving { bytes: sample.bytes.clone(), unreadable, reads: 0.into(), changes: false };

    let verdict = verify_source(Arc::new(moving), "bad disk", &VerifyOptions::default()).unwrap();

    let finding = verdict.findings.iter().find(|finding| finding.code == "unreadable").unwrap();
    assert_eq!(finding.place.block.as_deref(), Some("pc.bios"));
    assert_eq!(finding.place.page, Some(page as u64));
}

#[test]
fn digest_depends_on_ram_alone() {
    let digest = |bytes: Vec<u8>| {
        let options = VerifyOptions { threads: 3, digest: true };
        verify_source(Arc::new(bytes), "sample", &options).unwrap().digest.unwrap()
    };
    let sample = Plan::default().build();
    let (held, free) = (sample.page(0, true), sample.page(0, false));
    let stale = sample.edited(|bytes, s| bytes[s.page_range(0, free)].fill(9));
    let device = sample.edited(|bytes, s| bytes[s.devices + 20] ^= 1);
    let moved = Plan { uuid: Some([1; 16]), description: None, ..Plan::default() }.build().bytes;
    let changed = sample.edited(|bytes, s| bytes[s.page_range(0, held).start] ^= 1);

    let expected = digest(sample.bytes.clone());

    assert_ne!(fill(0, held), 0);
    for same in [stale, device, moved] {
        assert_eq!(digest(same), expected);
    }
    assert_ne!(digest(changed), expected);
    assert_eq!(digest(vector("file-mapped-ram")), digest(vector("file-legacy")));
}
