//! Capabilities and parameters.

use sterna_wire::WireError;

/// A capability or parameter that must be the same on both sides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingDifference {
    /// TLS at the peer only.
    #[error("{peer}: the peer uses TLS and this side has no TLS credentials: set them here too")]
    NoTlsHere {
        /// Address of the peer.
        peer: String,
    },
    /// TLS 1.2, whose sessions cannot be bound to a proof.
    #[error("the destination uses TLS 1.2, whose sessions cannot be identified: {0}")]
    Tls12(Tls12Use),
    /// `multifd` at the source only.
    #[error("{peer}: {}", RefusedLane::MultifdIsOff)]
    MultifdIsOffHere {
        /// Address of the source.
        peer: String,
    },
    /// `postcopy-ram` at the source only.
    #[error("postcopy-ram is on here and off at the destination: switch it on there, or off here")]
    PostcopyIsOffThere,
    /// `postcopy-preempt` on one side only.
    #[error(
        "postcopy-preempt is {} at the destination: set it alike",
        if *is_on_here { "on here and off" } else { "off here and on" }
    )]
    Preempt {
        /// Whether it is on at the source.
        is_on_here: bool,
    },
    /// The devices' state is larger than what a package of postcopy holds.
    #[error(
        "the devices' state is {bytes} bytes, more than a package of postcopy holds ({most}): migrate without postcopy"
    )]
    PackageTooLong {
        /// Length of the state.
        bytes: usize,
        /// The limit.
        most: u32,
    },
}

/// What a source does not do over TLS 1.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Tls12Use {
    /// Ask whether the guest runs.
    #[error("it is not asked")]
    StatusQuestion,
    /// Continue postcopy.
    #[error("the guest's pages do not go over it")]
    Recovery,
    /// Continue precopy.
    #[error("the migration cannot continue over it")]
    Reconnection,
}

/// Why a multifd channel that names this migration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedLane {
    /// This side uses no multifd channels.
    #[error("the source opens multifd channels and multifd is off here: switch it on, or off there")]
    MultifdIsOff,
    /// Its first packet does not fit this side's settings.
    #[error("{0}")]
    Hello(#[source] WireError),
}
