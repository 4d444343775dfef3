//! Memory that processes hand over, tested with two guests of one process.

use std::os::fd::AsFd;
use std::sync::Arc;

use sterna_ram::{Backing, ExternalMemory, RamBlock, RamError};

use crate::mapped::{Mapped, memfd};
use crate::support::skipped;

const PAGE: u64 = 4096;
const BYTES: u64 = 64 * PAGE;

fn block(backing: Backing) -> RamBlock {
    RamBlock::new("ram", BYTES, backing).unwrap()
}

fn byte(block: &RamBlock, offset: u64) -> u8 {
    let mut byte = [0];
    block.read(offset, &mut byte).unwrap();
    byte[0]
}

fn copy_of_descriptor(block: &RamBlock) -> std::fs::File {
    block.sharable().unwrap().file.as_fd().try_clone_to_owned().unwrap().into()
}

#[test]
fn kept_memory_is_the_blocks_own() {
    let (theirs, ours) = (block(Backing::Memfd), block(Backing::Memfd));
    theirs.write(PAGE, &[7]).unwrap();
    let address = ours.host_address();
    let mut taken = ours.take_memory(copy_of_descriptor(&theirs), 0).unwrap();
    taken.keep().unwrap();
    drop(taken);

    assert_eq!((ours.host_address(), byte(&ours, PAGE)), (address, 7));
    ours.write(0, &[9]).unwrap();
    assert_eq!(byte(&theirs, 0), 9, "one memory");
    theirs.let_go().unwrap();
    assert_eq!(byte(&theirs, 0), 0, "fresh memory");
    theirs.write(0, &[1]).unwrap();
    assert_eq!(byte(&ours, 0), 9);
    ours.discard_all().unwrap();
    assert_eq!(ours.resident_bytes().unwrap(), 0, "it is given back in the file that came");
}

#[test]
fn memory_that_was_given_away_is_not_accessed() {
    let file = memfd(BYTES, 0).unwrap();
    let mapped = Mapped::new(BYTES as usize, libc::MAP_SHARED, Some((file, 0))).unwrap();
    let memory = ExternalMemory::new(mapped.address(), BYTES, mapped.clone());
    let memory = memory.shared().file(Arc::clone(&mapped.file.as_ref().unwrap().0), 0);
    // SAFETY: `mapped` keeps the memory mapped until it is dropped.
    let theirs = unsafe { RamBlock::from_external("ram", memory) }.unwrap();
    theirs.sharable().expect("a VMM's file can be handed over");
    assert!(matches!(
        theirs.take_memory(copy_of_descriptor(&theirs), 0).unwrap_err(),
        RamError::NotReplaceable { .. }
    ));

    theirs.let_go().unwrap();

    assert!(matches!(theirs.read(0, &mut [0]).unwrap_err(), RamError::Gone { .. }));
    assert!(matches!(theirs.write(0, &[0]).unwrap_err(), RamError::Gone { .. }));
    assert!(matches!(theirs.sharable().unwrap_err(), RamError::Gone { .. }));
    assert!(theirs.empty().is_err() && theirs.zero_pages(0, 1).is_err());
}

#[test]
fn private_memory_is_neither_given_nor_replaced() {
    let (private, shared) = (block(Backing::Anonymous), block(Backing::Memfd));
    assert!(matches!(private.sharable().unwrap_err(), RamError::NotSharable { .. }));
    let refused = private.take_memory(copy_of_descriptor(&shared), 0).unwrap_err();
    assert!(matches!(refused, RamError::NotReplaceable { .. }), "{refused}");
    let pinned = shared.pin(0, PAGE).unwrap();
    let refused = shared.take_memory(copy_of_descriptor(&block(Backing::Memfd)), 0).unwrap_err();
    assert!(refused.to_string().contains("adapter"), "{refused}");
    drop(pinned);
}

#[test]
fn block_that_awaits_memory_has_none_before_and_after_it() {
    let theirs = block(Backing::Memfd);
    theirs.write(PAGE, &[7]).unwrap();
    let ours = RamBlock::awaiting("ram", BYTES, Backing::Memfd).unwrap();
    let address = ours.host_address();
    assert!(matches!(ours.read(0, &mut [0]).unwrap_err(), RamError::Gone { .. }));
    assert!(ours.populate(0, 1).is_err() && ours.empty().is_err() && ours.sharable().is_err());

    let taken = ours.take_memory(copy_of_descriptor(&theirs), 0).unwrap();
    assert_eq!(byte(&ours, PAGE), 7);
    taken.give_back().unwrap();
    assert!(matches!(ours.read(0, &mut [0]).unwrap_err(), RamError::Gone { .. }));

    let mut taken = ours.take_memory(copy_of_descriptor(&theirs), 0).unwrap();
    taken.keep().unwrap();
    assert_eq!((ours.host_address(), byte(&ours, PAGE)), (address, 7));
    ours.write(0, &[9]).unwrap();
    assert_eq!(byte(&theirs, 0), 9);
    assert!(RamBlock::awaiting("ram", BYTES, Backing::Anonymous).is_err());
    assert_eq!(
        RamBlock::awaiting("ram", 4 << 20, Backing::Huge2M).unwrap().host_address() as u64 % (2 << 20),
        0
    );
}

/// Runs only on a host with one reserved huge page, which is enough because the memory exists once.
#[test]
fn huge_pages_change_hands_as_pages_of_their_size() {
    let bytes = 2 << 20;
    let huge = |name: &str| RamBlock::new(name, bytes, Backing::Huge2M);
    let (Ok(theirs), Ok(ours)) = (huge("a"), RamBlock::awaiting("b", bytes, Backing::Huge2M)) else {
        return skipped("huge pages change hands", "too few huge pages are reserved (vm.nr_hugepages)");
    };
    theirs.write(5, &[7]).unwrap();
    let small = block(Backing::Memfd);
    assert!(ours.take_memory(copy_of_descriptor(&small), 0).unwrap_err().to_string().contains("4096 bytes"));
    let mut taken = ours.take_memory(copy_of_descriptor(&theirs), 0).unwrap();
    taken.keep().unwrap();
    theirs.let_go().unwrap();
    assert_eq!(byte(&ours, 5), 7);
    assert!(matches!(theirs.read(0, &mut [0]).unwrap_err(), RamError::Gone { .. }));
}
