//! The implementation of the RDMA traits for this host's adapters, by libibverbs and librdmacm.
//!
//! The first call that needs the libraries loads them, so the program also starts on hosts without them.

mod abi;
mod connection;
mod context;
mod domain;
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

use std::io;

use super::error::RdmaError;
pub use fabric::VerbsFabric;
pub use host::{GidReport, HostReport, PortReport};

/// Makes an error of `errno`, for a call that has just failed.
fn failed(subject: impl ToString, call: &'static str) -> RdmaError {
    error(subject, call, io::Error::last_os_error())
}

fn error(subject: impl ToString, call: &'static str, source: io::Error) -> RdmaError {
    RdmaError::System { subject: subject.to_string(), call, source }
}
