//! The front end of vhost-user, for virtio devices in other processes (specs/vhost-user.md). It also migrates
//! a device's state from one back end to another.
//!
//! # The model
//! The back end maps guest RAM and serves the device's rings. The VMM sends it the rings' addresses over a
//! Unix socket ([`VhostUserDevice`]). Three parts of the device migrate, each in its own way:
//!
//! | part | way |
//! | --- | --- |
//! | its writes to guest RAM | bits in a shared log ([`VhostUserLog`] feeds a [`sterna_ram::dirty::VhostLog`]) |
//! | its internal state, which only the back end understands | SET_DEVICE_STATE_FD: a pipe that is read to its end at the source and written at the destination; CHECK_DEVICE_STATE reports success |
//! | its rings: features, addresses, positions | GET_VRING_BASE; a record in Sterna's own format, which is the stream's *configuration* |
//!
//! The protocol lets a back end save only while its rings are stopped, so no state can be read while the
//! guest runs. Before a back end answers GET_VRING_BASE, it finishes and logs its requests. The sync after
//! [`sterna::DeviceStream::stop`] is therefore the last one.
//!
//! In a migration to another process of the same host (`mode` `cpr-transfer`), the connection is handed over
//! instead, as one of the guest's [`sterna::HostDescriptors`]. The back end keeps its state and gets the
//! first request from the new process after the commit.
//!
//! # Waiting
//! A back end may be slow, stopped or dead. A thread of the device makes the requests, and its callers wait
//! for a limited time. A back end that resumes later finds all requests in order, including those that undo
//! the migration, on an intact connection.

mod configuration;
mod device;
mod ended;
mod error;
mod handed_over;
mod kind;
mod link;
mod log;
mod log_base;
mod memory;
mod pipe;
mod requests;
mod ring;
mod section;
mod session;
mod stream;
mod transfer;
mod turn;
mod used_rings;
mod worker;

pub use device::{VhostUserDevice, VhostUserOptions};
pub use error::{StateDirection, VhostUserError};
pub use kind::DeviceKind;
pub use log::VhostUserLog;
pub use ring::Ring;
pub use section::VhostUserSection;
