//! Bytes that nobody wrote on purpose: no panic, no endless loop, no huge allocation.

use std::sync::Arc;

use sterna_image::Image;
use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect::inspect;
use sterna_image::tools::picture::picture;

use crate::common::vector;
use crate::sample::{PAGE, Plan, try_verdict};

#[test]
fn tools_survive_each_byte_of_the_structure_changed() {
    let sample = Plan::default().build();
    let in_pages =
        |at: usize| sample.blocks.iter().any(|b| (b.pages..b.pages + b.count * PAGE).contains(&at));
    for at in (0..sample.bytes.len()).filter(|at| !in_pages(*at)) {
        // Padding behind bitmaps is zeros and many; the description is long.
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
    let seed = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
    });
    println!("STERNA_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
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
