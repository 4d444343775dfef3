//! Tests that every [`Fabric`] must pass: facts about RDMA that the engine relies on. They run on the double on any machine,
//! and on soft-RoCE in the lab, which proves the double.
//!
//! A case panics if the fabric does not behave so.

mod connections;
mod keys;
mod memory;
mod receives;
mod rights;
mod setup;

use std::net::IpAddr;
use std::sync::Arc;

use super::Fabric;

/// Where the cases run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Setup {
    /// The host that connects and writes.
    pub source: Arc<dyn Fabric>,
    /// The host that listens and is written to. It may be the same host.
    pub destination: Arc<dyn Fabric>,
    /// On the destination's device, with another protection domain.
    pub other_domain: Arc<dyn Fabric>,
    /// The destination's address.
    pub address: IpAddr,
}

impl Setup {
    /// A setup of these parts.
    pub fn new(
        source: Arc<dyn Fabric>,
        destination: Arc<dyn Fabric>,
        other_domain: Arc<dyn Fabric>,
        address: IpAddr,
    ) -> Self {
        Self { source, destination, other_domain, address }
    }
}

/// A case: its name, and what runs it.
pub type Case = (&'static str, fn(&Setup));

/// All cases.
pub fn cases() -> impl Iterator<Item = Case> {
    [connections::CASES, keys::CASES, memory::CASES, receives::CASES, rights::CASES]
        .into_iter()
        .flatten()
        .copied()
}
