//! Migrations that are refused before they begin, and failures whose message contains the next step.

use sterna::error::{Difference, MigrationError, RdmaDifference};
use sterna::{Compression, SettingsError};
use sterna_transport::TransportError;
use sterna_transport::rdma::{CompletionStatus, RdmaError, RejectReason};
use sterna_wire::Fault;

use super::*;
use crate::support::cause;

#[test]
fn settings_that_rdma_does_not_carry_are_refused() {
    let lab = Lab::new(Settings::new());
    let guest = Plain::new(ram(None));
    let vm: Arc<dyn SourceVm> = guest;
    let to: Address = "rdma:10.0.0.2:1".parse().unwrap();
    let start = |params: Parameters, capabilities: Capabilities| match Migration::start(
        Arc::clone(&vm),
        &to,
        params,
        capabilities,
        Arc::new(()),
    ) {
        Err(StartError::Settings(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it has started"),
    };
    let params = || lab.parameters(ChunkSize::LEAST);
    let multifd = || Capabilities { multifd: true, ..Capabilities::default() };

    let compressed = Parameters { multifd_compression: Compression::Zstd, ..params() };
    assert_eq!(start(compressed, multifd()), SettingsError::RdmaIsUncompressed);
    let mapped = Capabilities { mapped_ram: true, ..Capabilities::default() };
    assert_eq!(start(params(), mapped), SettingsError::MappedNeedsFile);
}

#[test]
fn destination_that_registers_less_than_asked_for_is_named_with_its_chunk_size() {
    for mib in [1, 2] {
        let lab = Lab::new(Settings::new());
        let source = Plain::new(ram(Some(7)));
        let short = Manner { ignores_counts: true, ..manner(Kind::Qemu, mib) };

        let (outcome, ..) = migrate(&lab, &source, short, lab.parameters(ChunkSize::LEAST), false);

        let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
        let MigrationError::PeerIncompatible(Difference::Rdma(why)) = &error else { panic!("{error}") };
        let RdmaDifference::ChunkSize { chunk, .. } = why else { panic!("{error}") };
        assert_eq!(chunk.bytes(), mib << 20, "{error}");
        lab.assert_empty();
    }
}

#[test]
fn no_chunk_size_is_advised_for_a_sterna_which_registers_what_is_asked_for() {
    let lab = Lab::new(Settings::new());
    let source = Plain::new(ram(Some(7)));
    // No Sterna does this. It simulates a destination that has lost a registration.
    let short = Manner { ignores_counts: true, ..manner(Kind::Sterna, 1) };

    let (outcome, ..) = migrate(&lab, &source, short, lab.parameters(ChunkSize::LEAST), false);

    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let Some(RdmaError::Failed { operation, status, .. }) = cause(&error) else { panic!("{error:?}") };
    assert_eq!((*operation, *status), ("a write", CompletionStatus::RemoteAccess));
    assert!(!matches!(error, MigrationError::PeerIncompatible(_)), "{error}");
    lab.assert_empty();
}

#[test]
fn block_list_that_lies_is_refused_before_anything_is_written() {
    for kind in [Kind::Qemu, Kind::Sterna] {
        let lab = Lab::new(Settings::new());
        let source = Plain::new(ram(Some(7)));
        let liar = Manner { lies: true, ..manner(kind, 1) };

        let (outcome, ..) = migrate(&lab, &source, liar, lab.parameters(ChunkSize::LEAST), false);

        let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.fault(), Some(Fault::PeerIncompatible), "{error}");
        let MigrationError::Wire { error: broken, .. } = &error else { panic!("{error:?}") };
        assert_eq!(broken.message, "RAM_BLOCKS_RESULT", "{error}");
        assert_eq!(lab.network.counts_of(&lab.source).writes, 0);
        lab.assert_empty();
    }
}

#[test]
fn locked_memory_limit_that_is_too_small_is_named() {
    for limit_mib in [0, 3, 5] {
        let mut settings = Settings::new();
        settings.locked_memory_bytes = Some(limit_mib * MIB);
        let lab = Lab::new(settings);
        let destination = Network::new(Settings::new()).unwrap().host(&[[10, 0, 0, 2].into()]);
        drop(destination);

        let guest = Plain::new(ram(Some(7)));
        let target = Destination::listen(&lab.destination, ram(None), manner(Kind::Qemu, 1));
        let migration =
            start(&guest, &target, lab.parameters(ChunkSize::LEAST), Capabilities::default()).unwrap();

        let outcome = migration.wait();
        let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.fault(), Some(Fault::Local), "{error}");
        assert!(matches!(cause(&error), Some(RdmaError::LockedMemory { .. })), "{error}");
        lab.network.kill(&lab.destination);
        target.wait();
    }
}

#[test]
fn address_where_nobody_listens_is_an_error_that_says_so() {
    let lab = Lab::new(Settings::new());
    let vm: Arc<dyn SourceVm> = Plain::new(ram(None));
    let to: Address = "rdma:10.0.0.2:9".parse().unwrap();
    let params = lab.parameters(ChunkSize::LEAST);

    let migration = Migration::start(vm, &to, params, Capabilities::default(), Arc::new(())).unwrap();

    let outcome = migration.wait();
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let Some(TransportError::Connect { address, .. }) = cause(&error) else { panic!("{error:?}") };
    assert_eq!(*address, to.to_string());
    let Some(RdmaError::Rejected { reason, .. }) = cause(&error) else { panic!("{error:?}") };
    assert_eq!(*reason, RejectReason::NO_LISTENER);
    lab.assert_empty();
}
