//! What registering does to memory.

use sterna_ram::{Backing, RamBlock};

use super::setup::{Buffer, MIB, status_of, write};
use super::{Case, Setup};
use crate::rdma::{Access, CompletionStatus, Memory};

pub(super) const CASES: &[Case] = &[
    ("registering populates a hole", populates),
    ("registrations may overlap, and each has its own keys", overlap),
    ("writes to discarded pages are lost", stale_pages),
];

fn populates(setup: &Setup) {
    let joined = setup.join();
    for backing in [Backing::Anonymous, Backing::Memfd] {
        for access in [Access::SOURCE, Access::REMOTE_WRITE] {
            let block = RamBlock::new("hole", 4 * MIB as u64, backing).expect("memory");
            assert_eq!(block.resident_bytes().expect("asking"), 0);
            let half = Memory::of_block(&block, MIB as u64, 2 * MIB).expect("a range");

            let _registration = joined.destination.adapter().register(half, access).expect("a registration");

            let resident = block.resident_bytes().expect("asking");
            assert!(resident >= 2 * MIB as u64, "{backing:?}, {access:?}: {resident} bytes are resident");
        }
    }
}

fn overlap(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), MIB);
    let to = Buffer::of(&*joined.destination.adapter(), 2 * MIB, Access::REMOTE_WRITE);
    let again = Memory::of_block(&to.block, MIB as u64, MIB).expect("a range");
    let again = joined.destination.adapter().register(again, Access::REMOTE_WRITE).expect("a registration");
    assert_ne!(again.rkey(), to.rkey());
    let Buffer { block, registration } = to;

    drop(registration);

    let request = write(1, from.piece(0, MIB), again.memory().address(), again.rkey());
    assert_eq!(status_of(&*joined.source, request), CompletionStatus::Success);
    let mut bytes = vec![0; MIB];
    block.read(MIB as u64, &mut bytes).expect("reading");
    assert_eq!(bytes, from.bytes());
}

fn stale_pages(setup: &Setup) {
    let joined = setup.join();
    let from = Buffer::filled(&*joined.source.adapter(), MIB);
    let to = Buffer::of(&*joined.destination.adapter(), MIB, Access::REMOTE_WRITE);

    // SAFETY: the block is private anonymous memory of `to`, to which no Rust reference exists; its pages read as zero after.
    unsafe {
        rustix::mm::madvise(to.block.host_address().cast(), MIB, rustix::mm::Advice::LinuxDontNeed)
            .expect("discarding");
    }

    assert_eq!(status_of(&*joined.source, to.write(1, from.piece(0, MIB))), CompletionStatus::Success);
    assert!(to.is_untouched(), "a write to discarded pages shows");
}
