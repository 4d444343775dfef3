//! Guest RAM in a file whose file system is full.

use std::fs::File;

use sterna_ram::{GuestRam, PAGE_SIZE, RamBlock, RamError};
use sterna_testing::SmallDisk;

use crate::poison::forward_sigbus;

const PAGE: u64 = PAGE_SIZE as u64;
const PAGES: u64 = 64;

/// RAM of 64 pages in a sparse file.
fn ram(disk: &SmallDisk) -> GuestRam {
    let path = disk.path().join("ram");
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(PAGES * PAGE).unwrap();
    GuestRam::new(vec![RamBlock::of_file("ram", PAGES * PAGE, file).unwrap()]).unwrap()
}

/// Writes page after page. Returns the first one without space.
fn fill(ram: &GuestRam) -> (u64, RamError) {
    let write = |page: u64| Some((page, ram.block(0).write(page * PAGE, &[1; PAGE_SIZE]).err()?));
    (0..PAGES).find_map(write).expect("the file system has less space than the block")
}

#[test]
fn page_without_space_is_not_taken_for_poisoned_memory() {
    forward_sigbus();
    let test = "page_without_space_is_not_taken_for_poisoned_memory";
    let Some(disk) = SmallDisk::mount_for(test, 64 << 10) else { return };
    let ballast = disk.path().join("ballast");
    std::fs::write(&ballast, [1; 4 * PAGE_SIZE]).unwrap();
    let ram = ram(&disk);

    let (page, error) = fill(&ram);

    let RamError::NoSpace { block, offset, source } = &error else { panic!("{error}") };
    assert_eq!((block.as_str(), *offset), ("ram", page * PAGE));
    assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
    let address = ram.block(0).host_address() as usize + (page * PAGE) as usize;
    assert!(matches!(ram.why_failed_at(address + 7), Some(RamError::NoSpace { .. })));
    // A failed system call does not tell which page it met.
    assert!(matches!(ram.find_poisoned(), Err(RamError::NoSpace { .. })));
    assert_eq!(ram.poisoned(), [], "the page is usable once there is space");

    std::fs::remove_file(ballast).unwrap();
    ram.block(0).write(page * PAGE, &[2; PAGE_SIZE]).unwrap();
    assert_eq!(ram.find_poisoned().unwrap(), []);
}
