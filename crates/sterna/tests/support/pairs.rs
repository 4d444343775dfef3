//! Guests for tests of features that work together: on each kind of memory, with devices' streams and throttled.

use std::sync::Arc;

use sterna::ram::Backing;
use sterna::{Capabilities, Parameters, Tls, TlsCredentials, TlsEndpoint};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use super::bank::{Bank, Calls};
use super::vm::order;
use super::{TestVm, small};
use crate::common;

/// Adds TLS credentials for that end.
pub fn with_tls(params: &Parameters, directory: &std::path::Path, endpoint: TlsEndpoint) -> Parameters {
    let credentials = TlsCredentials::from_directory(directory, endpoint, false).unwrap();
    Parameters { tls: Some(Tls::new(Arc::new(credentials))), ..params.clone() }
}

/// A running guest and its destination. `None`, with a message in the log, if this host has too few huge pages for
/// both.
pub fn pair(config: &ProcessConfig) -> Option<(Arc<ProcessGuest>, Arc<ProcessGuest>)> {
    common::trace();
    let source = ProcessGuest::boot(config.clone());
    match source.and_then(|source| Ok((source, ProcessGuest::waiting(config.clone())?))) {
        Ok((source, target)) => {
            source.cont().unwrap();
            Some((source, target))
        }
        Err(error) => {
            assert_ne!(config.backing, Backing::Memfd, "{error}");
            tracing::warn!("skipped: {error}");
            None
        }
    }
}

/// Devices with a stream, for the source and for the destination.
pub fn banks(count: u32) -> [Vec<Arc<Bank>>; 2] {
    banks_of(count, |bank| bank)
}

/// Devices with a stream that require an acknowledgement before the switchover.
pub fn asking_banks(count: u32) -> [Vec<Arc<Bank>>; 2] {
    banks_of(count, Bank::asking)
}

fn banks_of(count: u32, change: impl Fn(Bank) -> Bank) -> [Vec<Arc<Bank>>; 2] {
    let (saves, loads) = (Calls::default(), Calls::default());
    let bank = |index| Arc::new(change(Bank::new(index, 5, 3_000_000, 1 << 20, &saves)));
    let ours: Vec<_> = (0..count).map(bank).collect();
    let theirs = ours.iter().map(|bank| Arc::new(bank.waiting(&loads))).collect();
    [ours, theirs]
}

/// Each of the two throttles in turn, with a pause for the operator before the switchover.
pub fn throttled(on: Capabilities) -> [Capabilities; 2] {
    let on = Capabilities { pause_before_switchover: true, ..on };
    [Capabilities { auto_converge: true, ..on }, Capabilities { dirty_limit: true, ..on }]
}

/// A guest that writes pages of every kind. With `has_streams`, it has devices with streams that require an
/// acknowledgement.
pub fn machines(config: &ProcessConfig, has_streams: bool) -> Option<[Arc<TestVm>; 2]> {
    let config = ProcessConfig { fill: Fill::Half(7), ..config.clone() };
    let [saving, loading] = asking_banks(if has_streams { 2 } else { 0 });
    let (source, target) = pair(&config)?;
    let source = TestVm::with_banks(source, saving);
    // The VM counts the dirty rate of its vCPU.
    source.dirty_limits.lock().unwrap().push(None);
    // Hints are used in precopy, except over RDMA.
    order(&source.hints, true);
    Some([source, TestVm::with_banks(target, loading)])
}

/// A guest on three huge pages.
pub fn on_huge_pages() -> ProcessConfig {
    ProcessConfig { backing: Backing::Huge2M, blocks: vec![("ram".to_owned(), 6 << 20)], ..small() }
}

/// Guests on each kind of memory of which a small amount is sufficient.
pub fn kinds() -> [ProcessConfig; 2] {
    [small(), on_huge_pages()]
}
