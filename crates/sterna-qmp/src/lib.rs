//! QMP, QEMU's monitor protocol. This crate contains a server for VMMs, a client for Sterna's VMMs and QEMU, and the
//! migration commands with QEMU's names, units, ranges and refusals.
//!
//! It has three layers, each usable without the ones below it in this list:
//!
//! * [`framing`]: converts the bytes of a connection to JSON values and back. It is as tolerant as QEMU's parser, and
//!   has limits that QEMU's parser lacks;
//! * [`server`] and [`client`]: greeting, negotiation, `id` echo, errors, events, and descriptors that are passed
//!   with the bytes;
//! * [`migration`]: [`MigrationControl`] stores an operator's settings and the migrations of one VM, and executes the
//!   commands, over QMP and as the human monitor.
//!
//! [`standby`] is the monitor of a standby, which runs no VM.
//!
//! This crate moves no RAM: `sterna` does, through [`migration::Engine`]. The jobs of a program that controls
//! migrations of such VMs and of QEMUs through their monitors are in `sterna-drive`.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod client;
pub mod error;
pub mod framing;
pub mod migration;
pub mod server;
pub mod standby;

pub use client::{Client, ClientError, Endpoint, QmpEvent};
pub use error::{ErrorClass, QmpError};
pub use migration::{Announcing, BlockDevice, MigrationControl, MonitoredVm};
pub use server::{EventBus, Handler, Server};
