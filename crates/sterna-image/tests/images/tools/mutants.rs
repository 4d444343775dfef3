//! Images with a few wrong bytes: `convert` refuses each image that `verify` reports as damaged.
//!
//! The option `force_damaged` turns this refusal off.

use std::path::Path;
use std::sync::Arc;

use sterna_image::convert::{ConvertOptions, Converted, Input, Output, convert};
use sterna_image::tools::verify::{VerifyOptions, structure, verify_source};
use sterna_image::{Format, Image, ImageError};

use super::sample::{Plan, describe};
use crate::common::{cut_down, legacy, machine, section};

/// Number of mutants of each image.
const MUTANTS: usize = 150;

/// Changes some bytes, truncates, or fills a range.
///
/// Most places are outside the pages, which are the largest part of an image.
fn mutate(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let length = bytes.len();
    if length == 0 {
        return;
    }
    let at = match random.usize(..4) {
        0 => random.usize(..length),
        1 => random.usize(..length.min(600)),
        _ => length - 1 - random.usize(..length.min(9000)),
    };
    match random.usize(..8) {
        0 => bytes.truncate(at),
        1 => {
            let end = (at + 1 + random.usize(..40)).min(length);
            bytes[at..end].fill([0, 0xff, 0x7e, b' '][random.usize(..4)]);
        }
        2 => {
            let end = (at + 1 + random.usize(..12)).min(length);
            let copy = bytes[at..end].to_vec();
            bytes.splice(at..at, copy);
        }
        _ => bytes[at] ^= 1 << random.usize(..8),
    }
}

/// An image of each kind, by name.
fn images(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let body = vec![7; 24];
    let mut shape = machine();
    shape.early = Vec::new();
    shape.devices = [section(9, "timer", &body), section(10, "apic", &[1; 40])].concat();
    shape.description = Some(describe(&[("timer", body), ("apic", vec![1; 40])], &[]).into_bytes());
    let small = legacy(&shape);
    let mut all = vec![
        ("mapped-ram".to_owned(), Plan::default().build().bytes),
        ("beside RAM".to_owned(), cut_down("dirty-bitmaps-legacy")),
    ];
    let source = directory.join("small");
    std::fs::write(&source, &small).unwrap();
    for kind in ["libvirt-raw", "libvirt-sparse", "legacy-zstd"] {
        let place = directory.join(kind);
        let target = Some(kind.parse::<Format>().unwrap());
        let xml = kind.starts_with("libvirt").then(|| b"<domain><name>a</name></domain>".to_vec());
        let options = ConvertOptions { target, xml, ..ConvertOptions::default() };
        convert(Input::File(source.clone()), Output::File(place.clone()), &options).unwrap();
        all.push((kind.to_owned(), std::fs::read(place).unwrap()));
    }
    all.push(("legacy".to_owned(), small));
    all
}

fn run(from: &Path, to: &Path, target: &str, force_damaged: bool) -> Result<Converted, ImageError> {
    let target = Some(target.parse::<Format>().unwrap());
    let options =
        ConvertOptions { target, force_damaged, replace: true, threads: 1, ..ConvertOptions::default() };
    convert(Input::File(from.into()), Output::File(to.into()), &options)
}

#[test]
fn convert_of_a_damaged_image_is_refused_unless_forced_and_then_says_what_it_left() {
    let seed = sterna_testing::seed("mutants");
    let mut random = fastrand::Rng::with_seed(seed);
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let (mut damaged, mut refused, mut forced, mut sound) = (0, 0, 0, 0);
    for (name, bytes) in images(directory.path()) {
        for mutant in 0..MUTANTS {
            let mut bytes = bytes.clone();
            (0..=random.usize(..2)).for_each(|_| mutate(&mut bytes, &mut random));
            if bytes.is_empty() {
                continue;
            }
            std::fs::write(&from, &bytes).unwrap();
            let target = ["mapped-ram", "legacy"][mutant % 2];
            let verdict = verify_source(Arc::new(bytes), &name, &VerifyOptions { threads: 1, digest: false });
            let is_sound = verdict.as_ref().is_ok_and(|verdict| verdict.is_sound());
            let findings = verdict.as_ref().map(|verdict| verdict.findings.clone());
            let done = run(&from, &to, target, false);
            let place =
                format!("{name}, mutant {mutant} of seed {seed}, to {target}: {findings:?}, {done:?}");
            if is_sound {
                assert!(!matches!(done, Err(ImageError::Damaged { .. })), "{place}");
                sound += 1;
                continue;
            }
            damaged += 1;
            assert!(done.is_err(), "{place}");
            if !matches!(done, Err(ImageError::Damaged { .. })) {
                continue;
            }
            refused += 1;
            // `structure`, which other tools use, must find damage in the same image.
            let seen = structure(&Image::open(&from).unwrap()).unwrap();
            assert!(
                seen.iter().any(|finding| findings.as_ref().unwrap().contains(finding)),
                "{place}: {seen:?}"
            );
            let done = run(&from, &to, target, true);
            assert!(done.as_ref().map_or(true, |done| !done.damage.is_empty()), "{place}, forced: {done:?}");
            forced += usize::from(done.is_ok());
        }
    }
    println!("{damaged} damaged, {refused} of them readable, {forced} converted by force, {sound} sound");
    assert!(refused > 50 && forced > 50 && sound > 100, "{damaged}, {refused}, {forced}, {sound}");
}
