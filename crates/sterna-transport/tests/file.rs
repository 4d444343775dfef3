//! Page files: complete or absent.

use sterna_ram::{Backing, PAGE_SIZE, RamBlock, RamSlice};
use sterna_transport::{IoPart, RamFile, TransportError};

const PAGE: u64 = PAGE_SIZE as u64;

#[test]
fn file_scattered_pages_come_back() {
    const PAGES: u64 = 3000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let from = RamBlock::new("from", PAGES * PAGE, Backing::Memfd).unwrap();
    for page in 0..PAGES {
        from.write_u64(page * PAGE + page % 500 * 8, page + 1).unwrap();
    }
    let file = RamFile::create(&path).unwrap();
    let mut parts = vec![IoPart::Bytes(b"header..")];
    parts.extend((0..PAGES).rev().map(|page| IoPart::Ram(from.page(page).unwrap())));
    file.write_at(100, &parts).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"front")]).unwrap();
    assert!(!path.exists(), "not in its place before it is complete");
    file.complete().unwrap();

    let file = RamFile::open(&path).unwrap();
    assert_eq!(file.len_bytes().unwrap(), 108 + PAGES * PAGE);
    let to = RamBlock::new("to", PAGES * PAGE, Backing::Anonymous).unwrap();
    let slices: Vec<RamSlice<'_>> = (0..PAGES).rev().map(|page| to.page(page).unwrap()).collect();
    file.read_at(108, &slices).unwrap();
    for page in 0..PAGES {
        assert_eq!(to.read_u64(page * PAGE + page % 500 * 8).unwrap(), page + 1);
    }
    file.read_at(0, &[to.slice(3, 5).unwrap()]).unwrap();
    let mut front = [0; 5];
    to.read(3, &mut front).unwrap();
    assert_eq!(&front, b"front");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "nothing is left aside");
}

#[test]
fn file_dropped_before_it_is_complete_leaves_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, "old").unwrap();
    let file = RamFile::create(&path).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"new")]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    drop(file);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);

    let file = RamFile::create(&path).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"new")]).unwrap();
    file.complete().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[test]
fn file_that_ends_too_early_says_where() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 5000]).unwrap();
    let to = RamBlock::new("to", 2 * PAGE, Backing::Memfd).unwrap();
    let all = [to.slice(0, 2 * PAGE_SIZE).unwrap()];
    match RamFile::open(&path).unwrap().read_at(1000, &all) {
        Err(TransportError::FileEnd { offset: 5000, missing, .. }) => assert_eq!(missing, 2 * PAGE - 4000),
        result => panic!("{result:?}"),
    }
}

#[test]
fn file_in_no_directory_is_refused() {
    assert!(matches!(RamFile::create("/nonexistent/image"), Err(TransportError::System { .. })));
    assert!(matches!(RamFile::open("/nonexistent/image"), Err(TransportError::System { .. })));
}
