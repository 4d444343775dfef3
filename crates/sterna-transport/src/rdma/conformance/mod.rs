//! Tests that every [`Fabric`] must pass: properties of RDMA that the engine relies on.
//!
//! They run on the double on any machine, and on soft-RoCE in the lab. The lab runs prove that the double is
//! faithful. A case panics if the fabric behaves differently.

mod connections;
mod ended;
mod keys;
mod memory;
mod receives;
mod rights;
mod setup;

use std::net::IpAddr;
use std::sync::Arc;

use super::Fabric;

/// The fabrics and the address that the cases use.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Setup {
    /// The host that connects and writes.
    pub source: Arc<dyn Fabric>,
    /// The host that listens and is written to. It may be the same host as `source`.
    pub destination: Arc<dyn Fabric>,
    /// A fabric on the destination's device, with another protection domain.
    pub other_domain: Arc<dyn Fabric>,
    /// IP address of the destination.
    pub address: IpAddr,
}

impl Setup {
    /// A setup of two hosts, a second domain and the destination's address.
    pub fn new(
        source: Arc<dyn Fabric>,
        destination: Arc<dyn Fabric>,
        other_domain: Arc<dyn Fabric>,
        address: IpAddr,
    ) -> Self {
        Self { source, destination, other_domain, address }
    }
}

/// A case: its name, and the function that runs it.
pub type Case = (&'static str, fn(&Setup));

/// All cases, by subject.
pub fn cases() -> impl Iterator<Item = Case> {
    [connections::CASES, ended::CASES, keys::CASES, memory::CASES, receives::CASES, rights::CASES]
        .into_iter()
        .flatten()
        .copied()
}
