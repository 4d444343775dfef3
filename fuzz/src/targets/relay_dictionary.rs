//! A dictionary of the relay at the destination: a file that may change, and what its source knows of it.

use std::io::Write;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, memfd_create};
use sterna_relay::frame::PAGE_BYTES;
use sterna_relay::pack::{Dictionary, Known, PageHash};
use sterna_relay::relay::ImageDictionary;

/// Bytes of the file for one byte of the input: each begins a run of equal bytes.
const RUN: usize = 512;

/// Reads the file, changes it, and looks for all pages: a found page has the content that was asked for.
pub fn target(data: &[u8]) {
    let [changes, rest @ ..] = data else { return };
    let content: Vec<u8> = rest.iter().flat_map(|byte| [*byte; RUN]).collect();
    let mut file = std::fs::File::from(memfd_create("dictionary", MemfdFlags::CLOEXEC).expect("memory"));
    file.write_all(&content).expect("memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let dictionary = ImageDictionary::open(path.as_ref()).expect("the file can be read");
    let whole: Vec<&[u8]> = content.chunks_exact(PAGE_BYTES).collect();
    let filled = whole.iter().filter(|page| page.iter().any(|byte| *byte != 0)).count();
    assert!(dictionary.pages() <= filled && dictionary.prefixes().len() == dictionary.pages());

    let mut known = Known::new(0, 0);
    known.announced(true, &dictionary.prefixes()).expect("few pages");
    let changed = usize::from(*changes) * 64;
    if changed < content.len() {
        file.set_len(changed as u64).expect("the file can be shorter");
        file.set_len(content.len() as u64).expect("the file can be longer");
    }
    for (at, page) in whole.iter().enumerate() {
        let hash = PageHash::of(page);
        let is_zero = page.iter().all(|byte| *byte == 0);
        assert_eq!(known.has(&hash, 1), !is_zero);
        let mut found = [0; PAGE_BYTES];
        let is_there = dictionary.copy(&hash, &mut found);
        assert!(!is_there || found[..] == **page, "page {at}");
        let is_unchanged = whole[..=at]
            .iter()
            .position(|other| other == page)
            .is_some_and(|first| (first + 1) * PAGE_BYTES <= changed || changed >= content.len());
        assert!(is_there || is_zero || !is_unchanged, "page {at} is there");
    }
}

/// First inputs, with their names.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut pages = vec![255];
    pages.extend((0..40).map(|at| at / 8 % 3));
    let mut changed = pages.clone();
    changed[0] = 65;
    vec![("pages".into(), pages), ("changed".into(), changed), ("short".into(), vec![0, 1, 2])]
}
