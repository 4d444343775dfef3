//! Moves that are refused before any resource is released.

use std::sync::Arc;

use sterna::Unsharable;
use sterna::error::{Difference, MemoryDifference, MigrationError};
use sterna::ram::{Backing, Custody, GuestRam, RamBlock, RamError};
use sterna::{
    Address, Capabilities, Compression, Migration, MigrationMode, Outcome, Parameters, SettingsError,
    StartError, Vm,
};

use super::{Place, listen, parameters};
use crate::common;
use crate::support::{self, TestVm, small, vm, vms};
use sterna_guests::process::{ProcessConfig, ProcessGuest};

fn refused(source: &Arc<TestVm>, to: &Address, params: Parameters, capabilities: Capabilities) -> StartError {
    let error = Migration::start(Arc::clone(source) as _, to, params, capabilities, Arc::new(())).err();
    let error = error.expect("a migration that must be refused has begun");
    assert_eq!(source.ram().custody(), Custody::Free);
    error
}

#[test]
fn settings_that_belong_to_copying_are_refused_by_name() {
    let (source, _) = vms();
    let to = Place::new().address();
    let on = Capabilities::default();
    let multifd = Capabilities { multifd: true, ..on };
    let zstd = Parameters { multifd_compression: Compression::Zstd, ..parameters() };
    for (params, capabilities, word) in [
        (parameters(), Capabilities { return_path: false, ..on }, "return_path"),
        (parameters(), Capabilities { auto_converge: true, ..on }, "auto_converge"),
        (parameters(), Capabilities { dirty_limit: true, ..on }, "dirty_limit"),
        (zstd, multifd, "multifd_compression"),
    ] {
        let error = refused(&source, &to, params, capabilities);
        let StartError::Settings(SettingsError::CprExcludes { what }) = &error else { panic!("{error}") };
        assert!(what.contains(word), "{error}");
    }
    for to in ["tcp:127.0.0.1:1", "fd:3", "file:/nowhere", "rdma:127.0.0.1:1"] {
        let error = refused(&source, &to.parse().unwrap(), parameters(), on);
        assert!(matches!(error, StartError::Settings(SettingsError::CprNeedsUnix)), "{to}: {error}");
    }
    common::assert_lives_on(&source.guest);
}

#[test]
fn private_memory_is_refused_at_the_source_with_the_cure() {
    let config = ProcessConfig { backing: Backing::Anonymous, ..small() };
    let guest = ProcessGuest::boot(config).unwrap();
    guest.cont().unwrap();
    let source = TestVm::new(guest);
    let error = refused(&source, &Place::new().address(), parameters(), Capabilities::default());
    let StartError::NotSharable(Unsharable::Block(why)) = &error else { panic!("{error}") };
    let RamError::NotSharable { block, .. } = &**why else { panic!("{error}") };
    assert_eq!(block, "ram.low");
    common::assert_lives_on(&source.guest);
}

/// The source reports the text of the destination's refusal, while its guest runs.
#[test]
fn machine_that_cannot_take_the_memory_says_why_to_the_source() {
    let private = ProcessConfig { backing: Backing::Anonymous, ..small() };
    let (source, _) = vms();
    let target = TestVm::new(ProcessGuest::waiting(private).unwrap());
    let place = Place::new();
    let incoming = listen(&target, &place, &parameters(), Capabilities::default());
    let migration =
        vm::start(&source, &incoming.address(), &parameters(), Capabilities::default(), Arc::new(()));
    let Outcome::Failed { error, held: false } = migration.wait() else { panic!() };
    let MigrationError::PeerIncompatible(Difference::Memory(MemoryDifference::RefusedThere { why })) = &error
    else {
        panic!("{error}")
    };
    // The destination's sentence is the subject: it comes over the wire as a text.
    assert!(why.contains("--backing memfd"), "{error}");
    support::ended(&incoming);
    common::assert_lives_on(&source.guest);
    support::assert_reset(&target);
}

#[test]
fn destination_that_waits_for_descriptors_takes_no_copy() {
    let (source, _) = vms();
    let block = |(name, bytes): &(String, u64)| RamBlock::awaiting(name, *bytes, Backing::Memfd).unwrap();
    let ram = GuestRam::new(small().blocks.iter().map(block).collect()).unwrap();
    let target = TestVm::new(ProcessGuest::waiting_in(small(), ram).unwrap());
    for (params, arrives) in [(common::parameters(), false), (parameters(), true)] {
        let place = Place::new();
        let incoming = listen(&target, &place, &params, Capabilities::default());
        let migration =
            vm::start(&source, &incoming.address(), &params, Capabilities::default(), Arc::new(()));
        let (outcome, arrival) = (migration.wait(), support::ended(&incoming));
        if arrives {
            common::assert_arrived(&outcome, &arrival, &target.guest);
            continue;
        }
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        let sterna::Arrival::Failed(theirs) = arrival else { panic!("{arrival:?}") };
        let MigrationError::PeerIncompatible(Difference::Memory(why)) = &theirs else { panic!("{theirs}") };
        assert!(matches!(why, MemoryDifference::ExpectedHere), "{theirs}");
        common::assert_lives_on(&source.guest);
    }
}

/// The source's setting decides.
#[test]
fn destination_takes_memory_without_a_setting_of_its_own() {
    let (source, target) = vms();
    let place = Place::new();
    let incoming = listen(&target, &place, &common::parameters(), Capabilities::default());
    assert_eq!(common::parameters().mode, MigrationMode::Normal);
    let migration =
        vm::start(&source, &incoming.address(), &parameters(), Capabilities::default(), Arc::new(()));
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
}
