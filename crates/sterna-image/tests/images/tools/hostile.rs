//! Random and invalid bytes: no panic, no endless loop, no huge allocation.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use sterna_image::Image;
use sterna_image::read::{ReadAt, Stamp};
use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect::inspect;
use sterna_image::tools::picture::picture;
use sterna_image::tools::verify::{Verdict, VerifyOptions, verify, verify_source};

use super::sample::{PAGE, Plan, put64, try_verdict};
use crate::common::vector;

#[test]
fn tools_survive_each_byte_of_the_structure_changed() {
    let sample = Plan::default().build();
    let in_pages =
        |at: usize| sample.blocks.iter().any(|b| (b.pages..b.pages + b.count * PAGE).contains(&at));
    for at in (0..sample.bytes.len()).filter(|at| !in_pages(*at)) {
        // The padding after bitmaps consists of many zeros, and the description is long. Test only a sample of both.
        if sample.bytes[at] == 0 && at % 61 != 0 || at > sample.eof + 6 && at % 11 != 0 {
            continue;
        }
        for value in [0xff, sample.bytes[at] ^ 0x81] {
            let mut bytes = sample.bytes.clone();
            bytes[at] = value;
            look(bytes);
        }
    }
}

#[test]
fn tools_survive_noise() {
    let mut rng = sterna_testing::random("tools_survive_noise");
    let mut random = move |below: usize| rng.usize(..below);
    let samples = [Plan::default().build().bytes, vector("file-legacy")];
    for round in 0..300 {
        let sample = &samples[usize::from(round % 8 == 0)];
        let mut bytes = sample.clone();
        for _ in 0..=random(8) {
            let at = match random(2) {
                0 => random(bytes.len().min(600)),
                _ => random(bytes.len()),
            };
            bytes[at] = random(256) as u8;
        }
        bytes.truncate(sample.len() - if random(3) == 0 { random(sample.len() / 2) } else { 0 });
        look(bytes);
    }
}

/// A long file: `head`, then one repeated byte. It records the largest read.
struct Long {
    head: Vec<u8>,
    rest: u8,
    length: u64,
    largest: AtomicUsize,
}

impl ReadAt for Long {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        self.largest.fetch_max(to.len(), Ordering::Relaxed);
        let count = (to.len() as u64).min(self.length.saturating_sub(offset)) as usize;
        to[..count].fill(self.rest);
        self.head.read_at(offset, &mut to[..count])?;
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        Ok(Stamp::default())
    }
}

/// The verdict of verify, and the largest read.
fn verdict_of(head: Vec<u8>, rest: u8, length: u64) -> (Verdict, usize) {
    let source = Arc::new(Long { head, rest, length, largest: AtomicUsize::new(0) });
    let options = VerifyOptions { threads: 1, digest: false };
    let verdict = verify_source(Arc::clone(&source) as Arc<dyn ReadAt>, "long", &options).unwrap();
    (verdict, source.largest.load(Ordering::Relaxed))
}

#[test]
fn verify_of_a_block_with_a_flipped_bit_in_its_length_takes_no_memory_for_it() {
    let sample = Plan::default().build();
    for bit in [40, 44, 45, 50, 63] {
        let head = sample.edited(|bytes, s| {
            let at = s.blocks[0].header - 8;
            put64(bytes, at, (150 * PAGE as u64) | (1 << bit));
        });

        let (verdict, largest) = verdict_of(head, 0, 200 << 20);

        assert!(!verdict.is_sound(), "bit {bit}: {:#?}", verdict.findings);
        assert!(largest <= 1 << 20, "bit {bit}: {largest} bytes at once");
    }
}

#[test]
fn verify_of_a_container_whose_text_never_ends_takes_little_memory_for_it() {
    for cookie in [0u32, 4] {
        let mut head = b"LibvirtQemudSave".to_vec();
        for word in [2u32, 90 << 20, 1, 0, cookie] {
            head.extend(word.to_le_bytes());
        }
        head.resize(92, 0);
        if cookie > 0 {
            head.extend(b"<a/\0");
        }

        let (verdict, largest) = verdict_of(head, b'x', 100 << 20);

        let code = if cookie > 0 { "cookie" } else { "xml" };
        assert!(verdict.has(code), "{:#?}", verdict.findings);
        assert!(largest <= 64 << 20, "{largest} bytes at once");
    }
}

#[test]
fn tools_of_a_pipe_that_nobody_writes_do_not_wait_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();

    for refused in [Image::open(&pipe).err(), verify(&pipe, &VerifyOptions::default()).err()] {
        let why = refused.expect("a pipe is no image").to_string();
        assert!(why.contains("neither a regular file nor a block device"), "{why}");
    }
}

fn look(bytes: Vec<u8>) {
    let _ = try_verdict(bytes.clone());
    let Ok(image) = Image::open_source(Arc::new(bytes), "noise") else { return };
    if image.shape().ram_bytes() > 1 << 30 {
        return;
    }
    let Ok(coverage) = Coverage::of(&image) else { return };
    let inspection = inspect(&image, &coverage).unwrap();
    assert!(picture(&inspection, &coverage).ends_with("</svg>\n"));
}
