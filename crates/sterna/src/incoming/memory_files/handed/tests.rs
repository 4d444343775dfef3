//! Descriptors that are not the promised memory are refused.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna_wire::extension::HandedOver;

use super::take;
use crate::error::{BadMemory, Difference, MemoryDifference, MigrationError, Misbehaviour};

const PAGES: u64 = 16;
const BYTES: u64 = PAGES * PAGE_SIZE as u64;

fn ram() -> GuestRam {
    let block = |name: &str| RamBlock::new(name, BYTES, Backing::Memfd).unwrap();
    GuestRam::new(vec![block("low"), block("high")]).unwrap()
}

fn entry(name: &str, offset: u64) -> HandedOver {
    HandedOver::Block { name: name.to_owned(), len_bytes: BYTES, page_bytes: PAGE_SIZE as u64, offset }
}

fn table() -> Vec<HandedOver> {
    vec![entry("low", 0), entry("high", 0)]
}

fn memory(ram: &GuestRam, index: usize) -> OwnedFd {
    ram.block(index).sharable().unwrap().file.as_fd().try_clone_to_owned().unwrap()
}

/// A memory file that is not part of a RAM block.
fn file(bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// Expects a refusal, and checks that all memory is unchanged.
#[track_caller]
fn refused(table: &[HandedOver], descriptors: Vec<OwnedFd>) -> MigrationError {
    let ours = ram();
    for block in ours.blocks() {
        block.write(0, &[7]).unwrap();
    }
    let error =
        take(&ours, table, &[], descriptors).err().expect("descriptors that must be refused were taken");
    for block in ours.blocks() {
        let mut byte = [0];
        block.read(0, &mut byte).unwrap();
        assert_eq!(byte, [7], "the own memory of {}", block.name());
        block.write(0, &[8]).expect("and it can be written");
    }
    error
}

/// Expects that the source is at fault.
#[track_caller]
fn misbehaved(table: &[HandedOver], descriptors: Vec<OwnedFd>) -> BadMemory {
    match refused(table, descriptors) {
        MigrationError::PeerMisbehaved(Misbehaviour::Memory(why)) => why,
        error => panic!("{error}"),
    }
}

/// Expects that the machines differ.
#[track_caller]
fn differs(table: &[HandedOver], descriptors: Vec<OwnedFd>) -> MemoryDifference {
    match refused(table, descriptors) {
        MigrationError::PeerIncompatible(Difference::Memory(why)) => why,
        error => panic!("{error}"),
    }
}

/// Expects that a descriptor is refused with `word`.
#[track_caller]
fn bad_descriptor(table: &[HandedOver], descriptors: Vec<OwnedFd>, word: &str) {
    let why = misbehaved(table, descriptors);
    let BadMemory::Descriptor(error) = &why else { panic!("{why}") };
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn memory_that_is_what_was_promised_is_seen_read_only_and_given_back() {
    let (theirs, ours) = (ram(), ram());
    theirs.block(1).write(5, &[9]).unwrap();
    let mut taken = take(&ours, &table(), &[], vec![memory(&theirs, 0), memory(&theirs, 1)]).unwrap();

    let mut byte = [0];
    ours.block(1).read(5, &mut byte).unwrap();
    assert_eq!(byte, [9]);
    assert!(ours.block(1).write(5, &[1]).unwrap_err().to_string().contains("read-only"));
    assert!(ours.block(1).zero_pages(0, PAGES).is_err() && ours.block(1).discard_all().is_err());
    assert!(ours.block(1).populate(0, 1).is_err());

    assert_eq!(taken.give_back(), Vec::<String>::new());
    ours.block(1).read(5, &mut byte).unwrap();
    assert_eq!(byte, [0], "its own memory again");
    ours.block(1).write(5, &[1]).unwrap();
    theirs.block(1).read(5, &mut byte).unwrap();
    assert_eq!(byte, [9]);
}

#[test]
fn two_parts_of_one_file_are_two_blocks() {
    let (ours, file) = (ram(), file(2 * BYTES));
    let table = [entry("low", BYTES), entry("high", 0)];
    let twice = || OwnedFd::from(file.try_clone().unwrap());
    assert!(take(&ours, &table, &[], vec![twice(), twice()]).is_ok());
}

#[test]
fn descriptors_that_are_too_few_too_many_or_of_other_blocks_are_refused() {
    let theirs = ram();
    let both = || vec![memory(&theirs, 0), memory(&theirs, 1)];
    let few = misbehaved(&table(), vec![memory(&theirs, 0)]);
    assert!(matches!(few, BadMemory::Count { descriptors: 1, listed: 2 }), "{few}");
    let many = misbehaved(&table(), [both(), vec![memory(&theirs, 0)]].concat_fds());
    assert!(matches!(many, BadMemory::Count { descriptors: 3, listed: 2 }), "{many}");
    let missing = misbehaved(&table()[..1], vec![memory(&theirs, 0)]);
    assert!(matches!(&missing, BadMemory::NoBlock { block } if block == "high"), "{missing}");
    let twice = misbehaved(&[entry("low", 0), entry("low", 0), entry("high", 0)], three(&theirs));
    assert!(matches!(&twice, BadMemory::Twice { block } if block == "low"), "{twice}");
    let unknown = differs(&[entry("low", 0), entry("high", 0), entry("rom", 0)], three(&theirs));
    assert!(matches!(&unknown, MemoryDifference::NoBlock { block } if block == "rom"), "{unknown}");
    let device = HandedOver::Device { name: "tap".into(), instance: 0, count: 1 };
    let device = differs(&[entry("low", 0), entry("high", 0), device], three(&theirs));
    assert!(
        matches!(&device, MemoryDifference::NoDevice { device, instance: 0 } if device == "tap"),
        "{device}"
    );
}

#[test]
fn memory_of_another_size_kind_or_right_is_refused() {
    let theirs = ram();
    let with = |low: OwnedFd| vec![low, memory(&theirs, 1)];
    let short = file(BYTES - PAGE_SIZE as u64);
    bad_descriptor(&table(), with(short.into()), "bytes, but 65536 at 0x0 are needed");
    let beyond = [entry("low", PAGE_SIZE as u64), entry("high", 0)];
    bad_descriptor(&beyond, with(memory(&theirs, 0)), "at 0x1000 are needed");
    let overflow = [entry("low", u64::MAX - 4095), entry("high", 0)];
    bad_descriptor(&overflow, with(memory(&theirs, 0)), "are needed");
    let odd = [entry("low", 512), entry("high", 0)];
    bad_descriptor(&odd, with(file(2 * BYTES).into()), "inside a page");
    let (_, pipe) = std::io::pipe().unwrap();
    bad_descriptor(&table(), with(pipe.into()), "neither a memfd nor a regular file");
    bad_descriptor(
        &table(),
        with(File::open("/dev/zero").unwrap().into()),
        "neither a memfd nor a regular file",
    );
    bad_descriptor(
        &table(),
        with(File::open("/dev/shm").unwrap().into()),
        "neither a memfd nor a regular file",
    );
    let read_only = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    read_only.as_file().set_len(BYTES).unwrap();
    bad_descriptor(&table(), with(File::open(read_only.path()).unwrap().into()), "reading and writing");
    let other_pages =
        HandedOver::Block { name: "low".into(), len_bytes: BYTES, page_bytes: 2 << 20, offset: 0 };
    let pages = differs(&[other_pages, entry("high", 0)], with(memory(&theirs, 0)));
    assert!(matches!(pages, MemoryDifference::BlockSize { page: 2_097_152, .. }), "{pages}");
}

#[test]
fn one_memory_for_two_blocks_is_refused() {
    let theirs = ram();
    let shared = misbehaved(&table(), vec![memory(&theirs, 0), memory(&theirs, 0)]);
    assert!(matches!(shared, BadMemory::Shared { .. }), "{shared}");
}

fn three(theirs: &GuestRam) -> Vec<OwnedFd> {
    vec![memory(theirs, 0), memory(theirs, 1), file(BYTES).into()]
}

trait ConcatFds {
    fn concat_fds(self) -> Vec<OwnedFd>;
}

impl<const N: usize> ConcatFds for [Vec<OwnedFd>; N] {
    fn concat_fds(self) -> Vec<OwnedFd> {
        self.into_iter().flatten().collect()
    }
}
