//! How the two sides of a migration differ, and the setting to change.

mod configuration;
mod machine;
mod memory;
mod protection;
#[cfg(feature = "rdma")]
mod rdma;
mod settings;

use sterna_wire::main::Command;

use crate::error::lower::Cause;

pub use configuration::ConfigurationDifference;
pub use machine::MachineDifference;
pub use memory::MemoryDifference;
pub use protection::{ProtectionDifference, UnknownDisk};
#[cfg(feature = "rdma")]
pub use rdma::{RdmaDifference, RemotePlace};
pub use settings::{RefusedLane, SettingDifference, Tls12Use};

/// A difference between the two sides because of which the guest cannot move.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Difference {
    /// Capabilities and parameters.
    #[error(transparent)]
    Setting(#[from] SettingDifference),
    /// A destination that makes its VM from the source's configuration.
    #[error(transparent)]
    Configuration(#[from] ConfigurationDifference),
    /// Devices, firmware and RAM of the two machines.
    #[error(transparent)]
    Machine(#[from] MachineDifference),
    /// Guest memory that moves as descriptors (mode `cpr-transfer`).
    #[error(transparent)]
    Memory(#[from] MemoryDifference),
    /// Settings of `rdma:`.
    #[cfg(feature = "rdma")]
    #[error(transparent)]
    Rdma(#[from] RdmaDifference),
    /// A primary and its standby.
    #[error(transparent)]
    Protection(#[from] ProtectionDifference),
    /// The source sent a command that this version does not support.
    #[error("the source sent {0:?}, which this side does not support")]
    Command(Box<Command>),
    /// The destination closed the preempt channel before it had taken a page. A QEMU whose `postcopy-preempt`
    /// is off does so, unless it loads the devices at that moment.
    #[error(
        "the destination closed the channel of requested pages before it took a page ({error}). If postcopy-preempt \
         is off there, serve it without --preempt, or switch the capability on there"
    )]
    PreemptClosed {
        /// How the channel ended.
        #[source]
        error: Cause,
    },
    /// An error that an earlier refusal of a multifd channel may have caused.
    #[error("{error}; a multifd channel had been refused: {why}")]
    RefusedLane {
        /// The error.
        #[source]
        error: Cause,
        /// The refusal.
        why: Box<RefusedLane>,
    },
    /// Pages are missing at the end of RAM, and a refused multifd channel may have been the source's.
    #[error("pages are missing, and a multifd channel had been refused: {0}")]
    PagesMissing(Box<RefusedLane>),
}
