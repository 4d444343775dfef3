//! Guest memory at the destination: which parts are registered, stay sparse, or are cleared.

use sterna::Vm;
use sterna::error::{Difference, MigrationError, RdmaDifference};
use sterna::ram::{Backing, GuestRam, RamBlock};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_transport::CancelFlag;
use sterna_transport::rdma::double::{Fault, Settings, Trigger};
use sterna_transport::rdma::{Access, Fabric, Memory, RdmaError, Registration};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{RegisterRequest, UnregisterRequest};

use super::source::{Guest, Habits, Source, records};
use super::{LIMIT, LONG, Lab, MIB, listen, small};
use crate::common;
use crate::support::{TestVm, cause, eventually, has_warning};

/// Bytes that are registered for messages of the main connection.
const BUFFERS: u64 = 4 * MIB;

fn paging(on_demand_paging: bool) -> Settings {
    let mut settings = Settings::new();
    settings.on_demand_paging = on_demand_paging;
    settings
}

fn resident(ram: &GuestRam) -> u64 {
    ram.blocks().iter().map(|block| block.resident_bytes().unwrap()).sum()
}

#[test]
fn sparse_memory_of_a_sterna_stays_sparse() {
    let config = ProcessConfig {
        blocks: vec![("ram.low".into(), 64 << 20), ("ram.high".into(), 32 << 20)],
        fill: Fill::Zero,
        ..small()
    };
    let guest = Guest::new(&config);
    let lab = Lab::with(Settings::new(), &config, |_| ());
    let mut source = Source::start(&lab, &guest, Habits::sterna(1));
    source.begin(false).unwrap();
    source.send_block(0).unwrap();
    source.send_block(1).unwrap();
    let windows = source.keys.len() as u64 * MIB;
    assert!(windows <= 48 * MIB, "the guest is not sparse: {windows}");
    let statistics = lab.incoming().statistics().rdma.unwrap();
    assert_eq!(statistics.pinned_bytes, windows);
    assert!(statistics.zero_ranges > 0 && statistics.commands > statistics.registrations, "{statistics:?}");
    source.finish().unwrap();
    // Checked before the comparison, because the comparison populates pages.
    assert_eq!(resident(&lab.target.ram()), windows, "memory that is not registered was populated");

    let stream = source.end().unwrap();

    lab.assert_arrived(&guest);
    drop(stream);
    lab.assert_empty();
}

#[test]
fn memory_that_holds_an_earlier_guest_is_cleared() {
    let guest = Guest::new(&small());
    let pin_all = Habits { pin_all: true, ..Habits::qemu(1) };
    let ways = [Habits::qemu(1), Habits::sterna(1), pin_all].map(|habits| [(habits, false), (habits, true)]);
    for (habits, on_demand_paging) in ways.into_iter().flatten() {
        let mut lab = Lab::with(paging(on_demand_paging), &small(), |_| ());
        let blocks = small().blocks.into_iter().map(|(name, bytes)| {
            let block = RamBlock::new(name, bytes, Backing::Memfd).unwrap();
            block.write(0, &vec![0xa5; bytes as usize]).unwrap();
            block
        });
        let ram = GuestRam::new(blocks.collect()).unwrap();
        let waiting = ProcessGuest::waiting_in(small(), ram.clone()).unwrap();
        lab.target = TestVm::new(waiting);
        *lab.incoming.lock().unwrap() = listen(&lab.target, &lab.destination, common::parameters(), &lab.log);

        let stream = Source::start(&lab, &guest, habits).run();

        lab.assert_arrived(&guest);
        drop(stream);
        lab.assert_empty();
    }
}

#[test]
fn page_that_changes_between_zero_and_not_over_the_rounds_is_what_it_was_last() {
    for (habits, on_demand_paging) in
        [(Habits::qemu(1), false), (Habits::qemu(1), true), (Habits::sterna(1), true)]
    {
        change_between_zero_and_not(habits, on_demand_paging);
    }
}

fn change_between_zero_and_not(habits: Habits, on_demand_paging: bool) {
    let guest = Guest::new(&small());
    let lab = Lab::with(paging(on_demand_paging), &small(), |_| ());
    let mut source = Source::start(&lab, &guest, habits);
    let blocks = [0, 1];
    for round in 0..3 {
        source.begin(false).unwrap();
        for block in blocks {
            source.send_block(block).unwrap();
        }
        // Zero everywhere, registered or not; the next round restores the content.
        if round < 2 {
            source.stream.flush_memory(LIMIT).unwrap();
            for block in blocks {
                source.zero(source.range(block, 0, guest.lengths()[block])).unwrap();
            }
        }
        source.finish().unwrap();
        if round < 2 {
            let is_zero =
                |block: &RamBlock| block.slice(0, block.len_bytes() as usize).unwrap().is_zero().unwrap();
            // A page that the adapter reads is populated.
            assert!(!on_demand_paging || resident(&lab.target.ram()) < MIB, "zeros were not given back");
            eventually("zeros", || lab.target.ram().blocks().iter().all(is_zero));
        }
    }

    let stream = source.end().unwrap();

    lab.assert_arrived(&guest);
    drop(stream);
    lab.assert_empty();
}

#[test]
fn hole_that_is_punched_under_a_registration_loses_what_is_written() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let mut source = Source::start(&lab, &guest, Habits::qemu(1));
    source.begin(false).unwrap();
    source.write(source.range(0, 0, 65536)).unwrap();
    source.stream.flush_memory(LIMIT).unwrap();

    // Does the sink's work, as if no registration kept the pages in place.
    let ram = lab.target.ram();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(ram.block(0).shared_file().unwrap().file, flags, 0, 65536).unwrap();
    source.write(source.range(0, 0, 65536)).unwrap();
    source.stream.flush_memory(LIMIT).unwrap();

    assert_eq!(lab.network.counts().stale_registrations, 1, "the adapters do not notice");
    let mut bytes = [0; 65536];
    ram.block(0).read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the write shows");
    drop(source);
    lab.assert_failed();
    lab.assert_empty();
}

#[test]
fn sterna_gives_memory_back_and_asks_again() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |params| {
        params.rdma.pinned_limit_bytes = Some(2 * MIB);
    });
    let mut source = Source::start(&lab, &guest, Habits::sterna(1));
    source.begin(false).unwrap();
    let pinned = || lab.incoming().statistics().rdma.unwrap().pinned_bytes;
    for round in 0..3 {
        for chunk in 0..3 {
            source.write(source.range(0, chunk * MIB, MIB)).unwrap();
            assert!(pinned() <= 2 * MIB);
            if chunk > 0 {
                source.stream.flush_memory(LIMIT).unwrap();
                let requests = [UnregisterRequest { chunk: chunk - 1, block: 0 }];
                source.stream.command(Command::Unregister(1), &records(&requests), LIMIT).unwrap();
                source.keys.remove(&(0, chunk - 1)).unwrap();
                assert_eq!(pinned(), MIB, "round {round}");
            }
        }
        source.stream.flush_memory(LIMIT).unwrap();
        let requests = [UnregisterRequest { chunk: 2, block: 0 }];
        source.stream.command(Command::Unregister(1), &records(&requests), LIMIT).unwrap();
        source.keys.clear();
    }
    source.send_block(1).unwrap();
    source.finish().unwrap();
    let stream = source.end().unwrap();
    lab.assert_arrived(&guest);
    drop(stream);
    lab.assert_empty();
}

#[test]
fn hole_that_is_punched_under_an_on_demand_registration_loses_nothing() {
    let guest = Guest::new(&small());
    let lab = Lab::with(paging(true), &small(), |_| ());
    let mut source = Source::start(&lab, &guest, Habits::qemu(1));
    source.begin(false).unwrap();
    source.write(source.range(0, 0, 65536)).unwrap();
    source.stream.flush_memory(LIMIT).unwrap();

    lab.target.ram().block(0).discard_all().unwrap();
    source.send_block(0).unwrap();
    source.send_block(1).unwrap();
    source.finish().unwrap();
    let stream = source.end().unwrap();

    // This also checks for stale registrations.
    lab.assert_arrived(&guest);
    drop(stream);
    lab.assert_empty();
}

/// A QEMU requests memory in each of its chunks, and a Sterna of an earlier version gives windows back.
#[test]
fn every_request_is_answered_with_the_key_of_the_whole_block_which_stays() {
    let guest = Guest::new(&small());
    for habits in [Habits::qemu(1), Habits::sterna(1)] {
        let lab = Lab::with(paging(true), &small(), |params| params.rdma.pinned_limit_bytes = Some(MIB));
        let mut source = Source::start(&lab, &guest, habits);
        source.begin(false).unwrap();
        for block in [0, 1] {
            source.send_block(block).unwrap();
            source.stream.flush_memory(LIMIT).unwrap();
            let chunks: Vec<_> = source.keys.iter().filter(|((of, _), _)| *of == block).collect();
            assert!(!chunks.is_empty() && chunks.iter().all(|(_, key)| *key == chunks[0].1), "{chunks:?}");
        }
        if habits.introduction.is_some() {
            let stated = source.places.blocks().iter().map(|place| place.key);
            assert!(stated.zip([0, 1]).all(|(key, block)| key == source.keys[&(block, 0)]));
            let requests =
                [UnregisterRequest { chunk: 0, block: 0 }, UnregisterRequest { chunk: 2, block: 0 }];
            source.stream.command(Command::Unregister(2), &records(&requests), LIMIT).unwrap();
            source.write(source.range(0, 0, MIB)).unwrap();
        } else {
            assert!(source.places.blocks().iter().all(|place| place.key == 0), "a QEMU is told no key");
        }
        let statistics = lab.incoming().statistics().rdma.unwrap();
        assert_eq!((statistics.registrations, statistics.pinned_bytes), (2, 0));
        assert!(lab.network.counts_of(&lab.destination).pinned_bytes <= BUFFERS);
        source.finish().unwrap();

        let stream = source.end().unwrap();

        lab.assert_arrived(&guest);
        drop(stream);
        lab.assert_empty();
    }
}

#[test]
fn more_than_the_limit_is_refused_with_what_to_set() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |params| {
        params.rdma.pinned_limit_bytes = Some(2 * MIB);
    });
    let source = Source::start(&lab, &guest, Habits::sterna(1));
    source.begin(false).unwrap();

    assert!(source.register(RegisterRequest { key: 0, block: 0, more_chunks: 2 }).is_err());

    let error = lab.assert_failed();
    let MigrationError::PeerIncompatible(Difference::Rdma(why)) = &error else { panic!("{error}") };
    assert!(matches!(why, RdmaDifference::PinnedLimit { limit, .. } if *limit == 2 * MIB), "{error}");
    drop(source);
    lab.assert_empty();
}

/// A destination of which another user has locked 2 MiB, and which may lock exactly the memory for its messages and
/// the guest.
fn crowded() -> (Lab, Registration) {
    let mut settings = Settings::new();
    settings.locked_memory_bytes = Some(BUFFERS + 4 * MIB);
    let lab = Lab::with(settings, &small(), |_| ());
    let route = lab.destination.resolve(lab.to(), LONG, &CancelFlag::new()).unwrap();
    let memory = Memory::anonymous(2 * MIB as usize).unwrap();
    let taken = route.adapter().register(memory, Access::SOURCE).unwrap();
    (lab, taken)
}

#[test]
fn locked_memory_limit_makes_windows_smaller_and_is_named() {
    let guest = Guest::new(&small());
    let (lab, taken) = crowded();
    let mut source = Source::start(&lab, &guest, Habits::qemu(1));
    source.begin(false).unwrap();

    let sent = source.send_block(0).and_then(|()| source.finish());

    assert!(sent.is_err());
    let events = lab.log.events();
    assert!(has_warning(&events, &["windows of 2097152 bytes"]), "{events:?}");
    assert!(has_warning(&events, &["x-rdma-chunk-size"]), "{events:?}");
    drop((source, taken));
    let error = lab.assert_failed();
    // The block and the place in it are only in the sentence.
    assert!(error.to_string().contains("\"ram.low\" from 0x200000 on"), "{error}");
    let Some(RdmaError::LockedMemory { limit, .. }) = cause(&error) else { panic!("{error:?}") };
    assert_eq!(*limit, 8 * MIB);
    lab.assert_next_works(&guest);
    lab.assert_empty();
}

#[test]
fn locked_memory_limit_is_looked_at_before_anything_is_registered_at_once() {
    let guest = Guest::new(&small());
    let (lab, taken) = crowded();
    let before = lab.network.counts_of(&lab.destination).registrations_made;

    let refused = Source::try_start(&lab, &guest, Habits { pin_all: true, ..Habits::qemu(1) }).err();

    assert!(refused.is_some());
    drop(taken);
    let error = lab.assert_failed();
    let Some(RdmaError::LockedMemory { wanted, .. }) = cause(&error) else { panic!("{error:?}") };
    assert_eq!(*wanted, 4 * MIB, "all of RAM");
    // Only the registrations for messages.
    assert_eq!(lab.network.counts_of(&lab.destination).registrations_made, before + 2);
    lab.assert_empty();
}

#[test]
fn registration_that_is_refused_names_block_and_reason() {
    let guest = Guest::new(&small());
    for (pin_all, number, block) in [(false, 1, "ram.low"), (false, 2, "ram.high"), (true, 2, "ram.high")] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        // After the registrations for messages.
        lab.network.plan(&lab.destination, Trigger::Registration(2 + number), Fault::Errno(12));
        let habits = Habits { pin_all, ..Habits::qemu(1) };
        let ended = Source::try_start(&lab, &guest, habits).and_then(|mut source| {
            source.begin(false)?;
            source.send_block(0)?;
            source.send_block(1)
        });
        assert!(ended.is_err());

        let text = lab.assert_failed().to_string();

        let words = [&format!("{block:?} from 0x0 on"), "os error 12"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        lab.assert_next_works(&guest);
        lab.assert_empty();
    }
}
