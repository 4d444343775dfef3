//! QMP, QEMU's monitor protocol: a server that a VMM puts on a socket, a client that drives Sterna's VMMs
//! and QEMU alike, and the migration commands under QEMU's own names, units, ranges and refusals.
//!
//! Three layers, each usable without the ones below it in this list:
//!
//! * [`framing`]: bytes of a connection to JSON values and back, tolerant as QEMU's parser is, bounded where
//!   QEMU's is not;
//! * [`server`] and [`client`]: greeting, negotiation, `id` echo, errors, events, descriptors passed beside
//!   the bytes;
//! * [`migration`]: [`MigrationControl`] holds what an operator has set and the migrations of one VM, and
//!   answers the commands, over QMP and as the human monitor does.
//!
//! Beside them [`drive`] has the jobs of a program at the other end of the socket: migrations of VMs, QEMU's
//! or Sterna's, driven through their monitors.
//!
//! [`standby`] is the monitor of a standby, which runs no VM.
//!
//! Nothing here moves RAM: `sterna` does, behind [`migration::Engine`].
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod client;
pub mod drive;
pub mod error;
pub mod framing;
pub mod migration;
pub mod server;
pub mod standby;

pub use client::{Client, ClientError, Endpoint, QmpEvent};
pub use error::{ErrorClass, QmpError};
pub use migration::{Announcing, BlockDevice, MigrationControl, MonitoredVm};
pub use server::{EventBus, Handler, Server};
