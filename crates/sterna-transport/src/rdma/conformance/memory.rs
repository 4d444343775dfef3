//! Conformance cases: population, pinning and discarding of registered memory.

use sterna_ram::{Backing, RamBlock};

use super::setup::{Buffer, MIB, status_of, write};
use super::{Case, Setup};
use crate::rdma::{Access, CompletionStatus, Memory, RdmaError};

pub(super) const CASES: &[Case] = &[
    ("registering populates a hole", populates),
    ("registrations may overlap, and each has its own keys", overlap),
    ("writes to discarded pages are lost", stale_pages),
    ("on-demand registrations pin nothing and follow the memory, or are refused", on_demand),
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

    // SAFETY: the block is private anonymous memory of `to`, to which no Rust reference exists. Its pages then
    // read as zero.
    unsafe {
        rustix::mm::madvise(to.block.host_address().cast(), MIB, rustix::mm::Advice::LinuxDontNeed)
            .expect("discarding");
    }

    assert_eq!(status_of(&*joined.source, to.write(1, from.piece(0, MIB))), CompletionStatus::Success);
    assert!(to.is_untouched(), "a write to discarded pages shows");
}

fn on_demand(setup: &Setup) {
    const BYTES: usize = 4 * MIB;
    let joined = setup.join();
    let adapters = [&joined.source, &joined.destination].map(|side| side.adapter());
    let blocks = [Backing::Anonymous, Backing::Memfd].map(|backing| {
        let block = || RamBlock::new("followed", BYTES as u64, backing).expect("memory");
        [block(), block()]
    });
    for [from, to] in &blocks {
        let accesses = [Access::SOURCE.on_demand(), Access::REMOTE_WRITE.on_demand()];
        let registered = [(0, from), (1, to)].map(|(side, block)| {
            let memory = Memory::of_block(block, 0, BYTES).expect("a range");
            adapters[side].register(memory, accesses[side])
        });
        let [has_source, has_destination] = [0, 1].map(|side| adapters[side].has_on_demand_paging());
        assert!(
            (0..2)
                .all(|side| adapters[side].info().on_demand_paging == adapters[side].has_on_demand_paging())
        );
        for (registered, has) in registered.iter().zip([has_source, has_destination]) {
            let number = registered.as_ref().err().map(|error| match error {
                RdmaError::Registration { source, .. } => source.raw_os_error(),
                other => panic!("{other}"),
            });
            assert_eq!(number, (!has).then_some(Some(libc::EOPNOTSUPP)), "announced: {has}");
        }
        let [Ok(source), Ok(target)] = registered else { continue };
        let resident = |block: &RamBlock| block.resident_bytes().expect("asking");
        assert_eq!((resident(from), resident(to)), (0, 0), "registering populates");
        for byte in [1, 2] {
            from.write(MIB as u64, &vec![byte; MIB]).expect("writing");
            let piece = source.piece(MIB, MIB as u32).expect("a piece inside");
            let address = target.memory().address() + 2 * MIB as u64;

            let request = write(byte.into(), piece, address, target.rkey());
            assert_eq!(status_of(&*joined.source, request), CompletionStatus::Success);

            let mut bytes = vec![0; BYTES];
            to.read(2 * MIB as u64, &mut bytes[..MIB]).expect("reading");
            assert!(bytes[..MIB].iter().all(|there| *there == byte), "a write to new pages is lost");
            assert!(resident(to) < 2 * MIB as u64 && resident(from) < 2 * MIB as u64, "more was populated");
            // The pages can be discarded under the registrations, because nothing pins them.
            [from, to].iter().for_each(|block| block.discard_all().expect("discarding"));
            assert_eq!((resident(from), resident(to)), (0, 0));
            to.read(0, &mut bytes).expect("reading");
            assert!(bytes.iter().all(|there| *there == 0), "old pages are still there");
            to.discard_all().expect("discarding");
        }
    }
}
