//! The adapters of this host: libibverbs and librdmacm behind the traits.
//!
//! Both libraries are loaded when the first call needs them, so the program starts where there are none.

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
mod ports;
mod queues;
mod sockaddr;
mod sysfs;

use std::io;

use super::RdmaError;
pub use fabric::VerbsFabric;
pub use host::{GidReport, HostReport, PortReport};

/// What `errno` says about a call that has just failed.
fn failed(subject: impl ToString, call: &'static str) -> RdmaError {
    error(subject, call, io::Error::last_os_error())
}

fn error(subject: impl ToString, call: &'static str, source: io::Error) -> RdmaError {
    RdmaError::System { subject: subject.to_string(), call, source }
}
