//! A virtio device in another process, over the vhost-user protocol: the front end, and its state's way out of one
//! back end and into another (specs/vhost-user.md).
//!
//! # The model
//! The back end maps guest RAM and serves the device's rings by itself; the VMM tells it where they are over a Unix
//! socket ([`VhostUserDevice`]). Three things of it have to move, each by its own way:
//!
//! | what | how |
//! | --- | --- |
//! | what it writes to guest RAM | its bits in a shared log ([`VhostUserLog`] feeds a [`sterna_ram::dirty::VhostLog`]) |
//! | its internal state, which only it understands | SET_DEVICE_STATE_FD: a pipe, read to its end here, written there; CHECK_DEVICE_STATE says whether it was all well |
//! | its rings: features, addresses, how far each has got | GET_VRING_BASE; a record of ours, which is the stream's *configuration* |
//!
//! The protocol lets a back end save only while its rings are stopped, so nothing of the state can be read while the
//! guest runs. Answering GET_VRING_BASE, a back end has finished what it was doing and logged it: the sync that
//! follows [`sterna::DeviceStream::stop`] is the last.
//!
//! To another process of the same host (`mode` `cpr-transfer`) the connection moves instead, as one of the guest's
//! [`sterna::HostDescriptors`]: the back end stays, with its state, and hears from the new process after the commit.
//!
//! # Waiting
//! A back end may be slow, stopped or dead. Requests are made on a thread of the device's own, and whoever asked waits
//! for a limited time. A back end that wakes up later finds the requests still in order, those that undo the migration
//! among them, and the connection unharmed.

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
