//! Pairs of features, as in docs/combinations.md: which of them exclude each other, with the text of the refusal, and
//! small migrations with two or more features that no other test combines.

mod at_once;
mod protection;
mod refused;
mod together;

use std::sync::Arc;

use sterna::ram::Backing;
use sterna::{Parameters, Tls, TlsCredentials, TlsEndpoint};
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use crate::common;
use crate::support::bank::{Bank, Calls};

/// Adds TLS credentials for that end.
fn with_tls(params: &Parameters, directory: &std::path::Path, endpoint: TlsEndpoint) -> Parameters {
    let credentials = TlsCredentials::from_directory(directory, endpoint, false).unwrap();
    Parameters { tls: Some(Tls::new(Arc::new(credentials))), ..params.clone() }
}

/// A running guest and its destination. `None`, with a message in the log, if this host has too few huge pages for
/// both.
fn pair(config: &ProcessConfig) -> Option<(Arc<ProcessGuest>, Arc<ProcessGuest>)> {
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
fn banks(count: u32) -> [Vec<Arc<Bank>>; 2] {
    banks_of(count, |bank| bank)
}

/// Devices with a stream that require an acknowledgement before the switchover.
fn asking_banks(count: u32) -> [Vec<Arc<Bank>>; 2] {
    banks_of(count, Bank::asking)
}

fn banks_of(count: u32, change: impl Fn(Bank) -> Bank) -> [Vec<Arc<Bank>>; 2] {
    let (saves, loads) = (Calls::default(), Calls::default());
    let bank = |index| Arc::new(change(Bank::new(index, 5, 3_000_000, 1 << 20, &saves)));
    let ours: Vec<_> = (0..count).map(bank).collect();
    let theirs = ours.iter().map(|bank| Arc::new(bank.waiting(&loads))).collect();
    [ours, theirs]
}
