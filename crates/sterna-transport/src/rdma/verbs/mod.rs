//! The implementation of the RDMA traits for this host's adapters, by libibverbs and librdmacm.
//!
//! The first call that needs the libraries loads them, so the program also starts on hosts without them.

mod abi;
mod connection;
mod context;
mod domain;
mod domains;
mod errno;
mod events;
mod fabric;
mod host;
mod id;
mod interfaces;
mod library;
mod listener;
mod locked;
#[cfg(test)]
mod mock;
mod ports;
mod queues;
mod sockaddr;
mod sysfs;

pub use fabric::VerbsFabric;
pub use host::{GidReport, HostReport, PortReport};
