//! Combinations of features that no other test covers.

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::Backing;
use sterna::ram::missing_pages::MissingPages;
use sterna::{
    Address, Capabilities, Compression, Incoming, Migration, MigrationMode, Parameters, Status, TlsEndpoint,
    ZeroPageDetection,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use crate::common;
use crate::support::pairs::{banks, kinds, on_huge_pages, pair, with_tls};
use crate::support::{TestVm, small, until_status, vm};

/// A guest on one huge page of the largest size.
fn on_1_gib() -> ProcessConfig {
    ProcessConfig { backing: Backing::Huge1G, blocks: vec![("ram".to_owned(), 1 << 30)], ..small() }
}

/// Guests on each kind of memory.
fn all_kinds() -> [ProcessConfig; 3] {
    [small(), on_huge_pages(), on_1_gib()]
}

/// Moves a guest with two devices that have streams.
fn with_streams(
    config: &ProcessConfig,
    at: &Address,
    [ours, theirs]: [&Parameters; 2],
    capabilities: Capabilities,
) {
    let [saving, loading] = banks(2);
    let Some((source, target)) = pair(config) else { return };
    let (source, target) = (TestVm::with_banks(source, saving), TestVm::with_banks(target, loading));
    let incoming =
        Incoming::listen(target.clone(), at, theirs.clone(), capabilities, Arc::new(())).expect("listening");
    let migration = vm::start(&source, &incoming.address(), ours, capabilities, Arc::new(()));
    if capabilities.pause_before_switchover {
        until_status(&migration, Status::PreSwitchover);
        migration.continue_switchover().unwrap();
    }
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    assert!(target.banks.iter().all(|bank| bank.runs()));
}

#[test]
fn same_host_with_device_streams_and_huge_pages() {
    let (lanes, multifd) = common::multifd(3);
    for config in all_kinds() {
        for (channels, capabilities) in [(2, Capabilities::default()), (lanes.multifd_channels, multifd)] {
            for pauses in [false, true] {
                let params = Parameters {
                    mode: MigrationMode::CprTransfer,
                    multifd_channels: channels,
                    ..common::parameters()
                };
                let capabilities = Capabilities { pause_before_switchover: pauses, ..capabilities };
                let directory = tempfile::tempdir().unwrap();
                let at = Address::Unix(directory.path().join("m"));
                with_streams(&config, &at, [&params, &params], capabilities);
            }
        }
    }
}

#[test]
fn device_streams_over_tls_with_and_without_compression_and_huge_pages() {
    let certificates = crate::certificates::good_directory();
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    for config in all_kinds() {
        for compression in [None, Some(Compression::None), Some(Compression::Zstd), Some(Compression::Zlib)] {
            let capabilities = Capabilities { multifd: compression.is_some(), ..Capabilities::default() };
            let multifd_compression = compression.unwrap_or_default();
            let params = Parameters { multifd_channels: 3, multifd_compression, ..common::parameters() };
            let ours = with_tls(&params, certificates.path(), TlsEndpoint::Client);
            let theirs = with_tls(&params, certificates.path(), TlsEndpoint::Server);
            with_streams(&config, &at, [&ours, &theirs], capabilities);
        }
    }
}

#[test]
fn zero_pages_with_compression_over_tls_on_huge_pages() {
    let certificates = crate::certificates::good_directory();
    for config in all_kinds() {
        let config = ProcessConfig { fill: Fill::Half(3), ..config };
        for multifd_compression in [Compression::None, Compression::Zstd, Compression::Zlib] {
            for zero_page_detection in
                [ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd]
            {
                let (params, capabilities) = common::multifd(2);
                let params = Parameters { multifd_compression, zero_page_detection, ..params };
                let Some((source, target)) = pair(&config) else { continue };
                let theirs = with_tls(&params, certificates.path(), TlsEndpoint::Server);
                let incoming = common::listen(&target, &theirs, capabilities);
                let ours = with_tls(&params, certificates.path(), TlsEndpoint::Client);
                let migration =
                    common::start(&source, &incoming.address(), &ours, capabilities, Arc::new(()));
                common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
            }
        }
    }
}

/// Capabilities for postcopy. `None` if this host forbids postcopy.
pub(super) fn postcopy() -> Option<Capabilities> {
    if let Err(error) = MissingPages::probe() {
        assert!(std::env::var_os("CI").is_none(), "{error}");
        tracing::warn!("skipped: {error}");
        return None;
    }
    Some(Capabilities { postcopy_ram: true, postcopy_preempt: true, ..Capabilities::default() })
}

/// Slow enough that precopy does not end by itself.
pub(super) fn slow() -> Parameters {
    Parameters { max_bandwidth_bytes: 10 << 20, ..common::parameters() }
}

fn writer(config: &ProcessConfig) -> ProcessConfig {
    ProcessConfig { fill: Fill::Random(7), workers: 4, ..config.clone() }
}

#[test]
fn postcopy_waits_before_the_switchover_and_then_goes_on() {
    let Some(on) = postcopy() else { return };
    for config in kinds() {
        for multifd in [false, true] {
            let capabilities = Capabilities { pause_before_switchover: true, multifd, ..on };
            let Some((source, target)) = pair(&writer(&config)) else { continue };
            let incoming = common::listen(&target, &slow(), capabilities);
            let migration = common::start(&source, &incoming.address(), &slow(), capabilities, Arc::new(()));
            migration.start_postcopy().unwrap();
            until_status(&migration, Status::PreSwitchover);
            assert!(!target.has_guest(), "it stands here until an operator goes on");
            migration.continue_switchover().unwrap();
            common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
            assert!(incoming.statistics().postcopy.is_some(), "it ran early");
        }
    }
}

#[test]
fn postcopy_with_a_throttle_and_with_acknowledged_switchover() {
    let Some(on) = postcopy() else { return };
    for capabilities in [
        Capabilities { auto_converge: true, ..on },
        Capabilities { switchover_ack: true, ..on },
        Capabilities { dirty_limit: true, ..on },
    ] {
        let (source, target) = common::pair(&writer(&small()));
        let (source, target) = (TestVm::new(source), TestVm::new(target));
        // The VM counts the dirty rate of its vCPU.
        source.dirty_limits.lock().unwrap().push(None);
        let params = Parameters { downtime_limit: Duration::ZERO, ..slow() };
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        crate::support::eventually("rounds", || migration.statistics().rounds_begun >= 2);
        migration.start_postcopy().unwrap();
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        assert!(incoming.statistics().postcopy.is_some(), "it ran early");
    }
}

#[test]
fn recovery_with_huge_pages_and_lanes() {
    let Some(on) = postcopy() else { return };
    let config = on_huge_pages();
    for multifd in [false, true] {
        let capabilities = Capabilities { multifd, ..on };
        let params = Parameters { max_postcopy_bandwidth_bytes: 4 << 20, ..slow() };
        let Some((source, target)) = pair(&writer(&config)) else { continue };
        let incoming = common::listen(&target, &params, capabilities);
        let migration = common::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        migration.start_postcopy().unwrap();
        until_status(&migration, Status::PostcopyActive);
        // A huge page that has arrived only in part is sent again.
        migration.pause().unwrap();
        crate::support::eventually("the pause", || incoming.status() == Status::PostcopyPaused);
        until_status(&migration, Status::PostcopyPaused);
        resume(&migration, &incoming);
        migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target);
    }
}

fn resume(migration: &Migration, incoming: &Incoming) {
    assert!(incoming.statistics().postcopy.is_some_and(|postcopy| postcopy.missing_pages > 0));
    migration.resume(&incoming.address()).unwrap();
}

/// Huge pages of 1 GiB are moved like others, also in postcopy, and after a recovery from the beginning.
#[test]
fn huge_pages_of_1_gib_move_before_and_after_the_guest() {
    let config = on_1_gib();
    let (lanes, _) = common::multifd(2);
    let mut ways = vec![(common::parameters(), Capabilities::default(), false)];
    if let Some(on) = postcopy() {
        let with_lanes = Capabilities { multifd: true, ..on };
        ways.extend([
            (common::parameters(), on, false),
            (lanes.clone(), with_lanes, false),
            (lanes, with_lanes, true),
        ]);
    }
    for (params, capabilities, breaks) in ways {
        let (Ok(source), Ok(target)) =
            (ProcessGuest::boot(config.clone()), ProcessGuest::waiting(config.clone()))
        else {
            tracing::warn!("skipped: this host has no two huge pages of 1 GiB");
            return;
        };
        source.cont().unwrap();
        let incoming = common::listen(&target, &params, capabilities);
        let migration = common::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        if capabilities.postcopy_ram {
            migration.start_postcopy().unwrap();
        }
        if breaks {
            until_status(&migration, Status::PostcopyActive);
            migration.pause().unwrap();
            crate::support::eventually("the pause", || incoming.status() == Status::PostcopyPaused);
            until_status(&migration, Status::PostcopyPaused);
            resume(&migration, &incoming);
        }
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &target);
    }
}
