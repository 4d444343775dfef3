//! Guests that run while their memory arrives.

#![allow(clippy::print_stderr, reason = "a test that cannot run says why")]

use std::thread;

use sterna_pager::cloud_hypervisor::{Restore, RestorePlan, SessionError};
use sterna_pager::{FillRate, GuestStage};
use sterna_uffd_peer::cloud_hypervisor::{Arrived, ERROR, Guest, OK, Receiver, Reply, command};
use sterna_uffd_peer::sum;

use super::{MIB, World, ended, failed, is_completed};

/// A lazy restore. `None` if this host makes huge pages of memfds; the test then skips.
fn lazy(test: &str, world: &World, fill: FillRate) -> Option<Restore> {
    let plan = RestorePlan { is_lazy: true, threads: 2, fill, ..RestorePlan::new(world.socket()) };
    match Restore::start(world.open(&world.image()), plan) {
        Err(why @ SessionError::HugeShmem { .. }) => {
            eprintln!("SKIPPED {test}: {why}");
            None
        }
        started => Some(started.unwrap()),
    }
}

#[test]
fn walk_of_the_vmm_gets_all_memory_at_every_rate() {
    let name = "walk_of_the_vmm_gets_all_memory_at_every_rate";
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    for fill in [FillRate::Off, FillRate::BytesPerSecond(1 << 30), FillRate::Adaptive, FillRate::Max] {
        let Some(restore) = lazy(name, &world, fill) else { return };
        let last = (1 << 32) + MIB;
        let arrived = vmm.receive(|number, arrived: &Arrived| {
            // The devices touch memory while the VMM loads them.
            if number == command::STATE {
                assert_eq!(arrived.request(last, 4096).unwrap(), Some(OK));
                assert_eq!(arrived.request(0x3000, 0x5000).unwrap(), Some(OK));
            }
            Reply::Status(OK)
        });
        let mut arrived = arrived.unwrap();
        assert!(restore.needs_image());
        assert_eq!(arrived.walk(&world.machine).unwrap(), Some(OK), "{fill:?}");
        assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory, "{fill:?}");
        assert!(matches!(restore.statistics().stage, GuestStage::Active));
        arrived.faults = None;

        let statistics = ended(&restore);
        assert!(is_completed(&statistics) && !restore.needs_image(), "{statistics:#?}");
        assert_eq!(statistics.missing_pages, 0);
        assert_eq!(statistics.faults, statistics.total_pages + 2);
        assert_eq!(arrived.last, command::COMPLETE);
    }
}

/// Without a fill, only frames that the VMM asks for are there.
#[test]
fn memory_is_empty_until_the_vmm_asks() {
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    let Some(restore) = lazy("memory_is_empty_until_the_vmm_asks", &world, FillRate::Off) else { return };
    let arrived = vmm.accept().unwrap();
    assert_eq!(arrived.memory_of(&world.machine).unwrap(), vec![0; world.machine.memory.len()]);

    assert_eq!(arrived.request(0x41000, 4096).unwrap(), Some(OK));

    let memory = arrived.memory_of(&world.machine).unwrap();
    let (start, end) = (0x40000, 0x50000);
    assert!(memory[start..end] == world.machine.memory[start..end]);
    assert!(memory[..start].iter().chain(&memory[end..]).all(|byte| *byte == 0));
    let statistics = restore.statistics();
    assert_eq!(statistics.total_pages - statistics.missing_pages, 16);
}

#[test]
fn pages_near_a_request_are_there_before_the_vmm_asks() {
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    // The rate alone would take an hour.
    let name = "pages_near_a_request_are_there_before_the_vmm_asks";
    let Some(restore) = lazy(name, &world, FillRate::BytesPerSecond(100)) else { return };
    let arrived = vmm.accept().unwrap();

    assert_eq!(arrived.request(0, 4096).unwrap(), Some(OK));

    let end = std::time::Instant::now() + super::PATIENCE;
    while arrived.memory_of(&world.machine).unwrap() != world.machine.memory {
        assert!(std::time::Instant::now() < end, "{:#?}", restore.statistics());
        thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(restore.statistics().faults, 1);
}

#[test]
fn guest_with_a_real_userfaultfd_runs_meanwhile_and_keeps_what_it_writes() {
    let name = "guest_with_a_real_userfaultfd_runs_meanwhile_and_keeps_what_it_writes";
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    let Some(restore) = lazy(name, &world, FillRate::Max) else { return };
    let mut guest = match Guest::start(vmm.accept().unwrap(), &world.machine) {
        Ok(guest) => guest,
        Err(why) => {
            eprintln!("SKIPPED {name}: userfaultfd of shared memory: {why}");
            return;
        }
    };
    let written = [0x5008, 0x1f_f000, (1 << 32) + 0x10_2ff8];
    for address in written {
        guest.write(address, 0xfeed_0000 + address);
    }
    let mut memory = Vec::new();
    for slot in &world.machine.slots {
        for at in (0..slot.bytes).step_by(8) {
            memory.extend_from_slice(&guest.read(slot.address + at).to_le_bytes());
        }
    }
    let requests = guest.complete().unwrap();

    let statistics = ended(&restore);
    assert!(is_completed(&statistics), "{statistics:#?}");
    assert!(requests >= statistics.total_pages && statistics.faults == requests);
    let mut expected = world.machine.memory.clone();
    for (at, address) in
        [(written[0], written[0]), (written[1], written[1]), (0x20_0000 + 0x10_2ff8, written[2])]
    {
        expected[at as usize..at as usize + 8].copy_from_slice(&(0xfeed_0000 + address).to_le_bytes());
    }
    assert_eq!(sum(&memory), sum(&expected));
    for address in written {
        assert_eq!(guest.read(address), 0xfeed_0000 + address, "after the fill");
    }
}

#[test]
fn request_that_breaks_a_rule_is_answered_with_an_error() {
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    for (address, bytes) in [(2 * MIB, 4096), (0x1f_f000, 8192), (5, 4096), (0, 0), (!0xfff, 8192)] {
        let name = "request_that_breaks_a_rule_is_answered_with_an_error";
        let Some(restore) = lazy(name, &world, FillRate::Off) else { return };
        let arrived = vmm.accept().unwrap();

        assert_eq!(arrived.request(address, bytes).unwrap(), Some(ERROR), "{address:#x} {bytes}");

        let is_right =
            |error: &SessionError| matches!(error, SessionError::Outside { .. } | SessionError::Message(_));
        failed(&restore, is_right);
        assert!(arrived.request(0, 4096).is_err() || arrived.request(0, 4096).unwrap().is_none());
    }
}

#[test]
fn connection_that_ends_too_early_is_an_error_and_an_operator_can_end_it() {
    let name = "connection_that_ends_too_early_is_an_error_and_an_operator_can_end_it";
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    let Some(restore) = lazy(name, &world, FillRate::Off) else { return };
    let mut arrived = vmm.accept().unwrap();
    arrived.request(0, 4096).unwrap();
    arrived.faults = None;
    failed(
        &restore,
        |error| matches!(error, SessionError::Incomplete { missing_pages } if *missing_pages > 0),
    );

    let Some(restore) = lazy(name, &world, FillRate::Off) else { return };
    let arrived = vmm.accept().unwrap();
    restore.stop();
    failed(&restore, |error| matches!(error, SessionError::Stopped));
    assert!(arrived.request(0, 4096).map_or(true, |status| status.is_none()));
    // The VMM refuses the state while its pages are served.
    let Some(restore) = lazy(name, &world, FillRate::Off) else { return };
    let refuse = |number, _: &Arrived| Reply::Status(if number == command::STATE { ERROR } else { OK });
    let _ = vmm.receive(refuse);
    failed(&restore, |error| matches!(error, SessionError::Refused { .. }));
}

/// Several guests share one cache of frames.
#[test]
fn guests_of_one_image_are_restored_at_once() {
    let world = World::new();
    world.saved();
    let machine = world.open(&world.image());
    let sockets: Vec<_> = (0..3).map(|number| world.path(&format!("{number}.sock"))).collect();
    let vmms: Vec<_> = sockets.iter().map(|socket| Receiver::bind(socket, true).unwrap()).collect();
    let start = |socket: &std::path::PathBuf| {
        let plan = RestorePlan { is_lazy: true, threads: 2, ..RestorePlan::new(socket.clone()) };
        Restore::start(std::sync::Arc::clone(&machine), plan)
    };
    let restores: Vec<_> = match sockets.iter().map(start).collect::<Result<_, _>>() {
        Err(why @ SessionError::HugeShmem { .. }) => {
            eprintln!("SKIPPED guests_of_one_image_are_restored_at_once: {why}");
            return;
        }
        started => started.unwrap(),
    };

    thread::scope(|scope| {
        for vmm in &vmms {
            scope.spawn(|| {
                let arrived = vmm.accept().unwrap();
                assert_eq!(arrived.walk(&world.machine).unwrap(), Some(OK));
                assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory);
            });
        }
    });
    assert!(restores.iter().all(|restore| is_completed(&ended(restore))));
}
