//! All features that can be combined, in one migration, for each transport.

use std::sync::Arc;

use sterna::{
    Address, Capabilities, Compression, Incoming, Migration, MigrationMode, Outcome, Parameters, Status,
    TlsEndpoint, ZeroPageDetection,
};
use sterna_guests::process::ProcessGuest;
use sterna_transport::rdma::double::{Network, Settings};

use super::together::{postcopy, slow};
use crate::common;
use crate::support::pairs::{kinds, machines, throttled, with_tls};
use crate::support::{TestVm, until_status, vm};

const DETECTIONS: [ZeroPageDetection; 3] =
    [ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd];

fn begin(source: &Arc<TestVm>, to: &Address, params: &Parameters, on: Capabilities) -> Migration {
    vm::start(source, to, params, on, Arc::new(()))
}

fn goes_on(migration: &Migration) {
    until_status(migration, Status::PreSwitchover);
    migration.continue_switchover().unwrap();
}

fn arrived(migration: &Migration, incoming: &Incoming, target: &TestVm) {
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    assert!(target.banks.iter().all(|bank| bank.runs()));
}

#[test]
fn precopy_with_everything_that_goes_with_it() {
    let certificates = crate::certificates::good_directory();
    let (params, multifd) = common::multifd(3);
    for config in kinds() {
        for capabilities in throttled(Capabilities { switchover_ack: true, ..multifd }) {
            for multifd_compression in [Compression::Zstd, Compression::Zlib] {
                for zero_page_detection in DETECTIONS {
                    let params = Parameters { multifd_compression, zero_page_detection, ..params.clone() };
                    let Some([source, target]) = machines(&config, true) else { continue };
                    let theirs = with_tls(&params, certificates.path(), TlsEndpoint::Server);
                    let incoming = vm::listen(&target, &theirs, capabilities);
                    let ours = with_tls(&params, certificates.path(), TlsEndpoint::Client);
                    let migration = begin(&source, &incoming.address(), &ours, capabilities);
                    goes_on(&migration);
                    arrived(&migration, &incoming, &target);
                    assert!(migration.statistics().free_pages > 0, "the guest was asked");
                }
            }
        }
    }
}

#[test]
fn postcopy_with_everything_that_goes_with_it() {
    let Some(on) = postcopy() else { return };
    let certificates = crate::certificates::good_directory();
    for config in kinds() {
        for capabilities in throttled(Capabilities { switchover_ack: true, multifd: true, ..on }) {
            for multifd_compression in [Compression::Zstd, Compression::Zlib] {
                let params = Parameters { multifd_channels: 2, multifd_compression, ..slow() };
                let Some([source, target]) = machines(&config, true) else { continue };
                let theirs = with_tls(&params, certificates.path(), TlsEndpoint::Server);
                let incoming = vm::listen(&target, &theirs, capabilities);
                let ours = with_tls(&params, certificates.path(), TlsEndpoint::Client);
                let migration = begin(&source, &incoming.address(), &ours, capabilities);
                migration.start_postcopy().unwrap();
                goes_on(&migration);
                arrived(&migration, &incoming, &target);
                assert!(incoming.statistics().postcopy.is_some(), "it ran early");
            }
        }
    }
}

#[test]
fn same_host_with_everything_that_goes_with_it() {
    let (params, multifd) = common::multifd(3);
    let params = Parameters { mode: MigrationMode::CprTransfer, ..params };
    let capabilities = Capabilities { switchover_ack: true, pause_before_switchover: true, ..multifd };
    for config in kinds() {
        let Some([source, target]) = machines(&config, true) else { continue };
        let directory = tempfile::tempdir().unwrap();
        let at = Address::Unix(directory.path().join("m"));
        let incoming =
            Incoming::listen(target.clone(), &at, params.clone(), capabilities, Arc::new(())).unwrap();
        let migration = begin(&source, &at, &params, capabilities);
        goes_on(&migration);
        arrived(&migration, &incoming, &target);
        assert_eq!(migration.statistics().normal_pages, 0, "no page is copied");
    }
}

#[test]
fn rdma_with_everything_that_goes_with_it() {
    let (params, multifd) = common::multifd(3);
    for config in kinds() {
        for capabilities in throttled(Capabilities { switchover_ack: true, ..multifd }) {
            for zero_page_detection in DETECTIONS {
                let network = Network::new(Settings::seeded(7)).unwrap();
                let host = network.host(&[[10, 0, 0, 1].into()]);
                let mut params = Parameters { zero_page_detection, ..params.clone() };
                params.rdma.fabric = Some(Arc::new(host));
                let Some([source, target]) = machines(&config, true) else { continue };
                let incoming = vm::listen(&target, &params, capabilities);
                let migration = begin(&source, &incoming.address(), &params, capabilities);
                goes_on(&migration);
                arrived(&migration, &incoming, &target);
            }
        }
    }
}

#[test]
fn images_with_everything_that_goes_with_them() {
    let (lanes, multifd) = common::multifd(3);
    let mapped = Capabilities { mapped_ram: true, ..multifd };
    let stream = Capabilities { multifd: false, ..multifd };
    for config in kinds() {
        for form in [mapped, stream] {
            for capabilities in throttled(form) {
                for zero_page_detection in DETECTIONS {
                    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                    let file = Address::File { path: directory.path().join("image"), offset: 0 };
                    let params = Parameters { zero_page_detection, ..lanes.clone() };
                    let Some([source, target]) = machines(&config, true) else { continue };
                    let migration = begin(&source, &file, &params, capabilities);
                    goes_on(&migration);
                    let outcome = migration.wait();
                    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
                    assert!(migration.statistics().free_pages > 0, "the guest was asked");
                    let off = Capabilities { pause_before_switchover: false, ..form };
                    let incoming =
                        Incoming::listen(target.clone(), &file, params, off, Arc::new(())).expect("loading");
                    arrived(&migration, &incoming, &target);
                    assert!(ProcessGuest::progress(&target.guest).total_steps() > 0);
                }
            }
        }
    }
}
