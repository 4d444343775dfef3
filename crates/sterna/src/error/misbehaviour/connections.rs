//! Connections that do not belong to the migration that waits for them.

use std::fmt;

use sterna_proto::destination::Refusal;

use crate::error::lower::Cause;

/// Which channel of a migration a connection claims to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChannelRole {
    /// The main channel.
    Main,
    /// The multifd channel with this number.
    Multifd(usize),
    /// The channel of requested pages in postcopy (`postcopy-preempt`).
    Preempt,
}

impl fmt::Display for ChannelRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Main => f.write_str("the main channel"),
            Self::Multifd(id) => write!(f, "multifd channel {id}"),
            Self::Preempt => f.write_str("the preempt channel"),
        }
    }
}

/// How a connection fails to prove that it comes from the migration's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unproven {
    /// It names another migration, or this side has not received the secret yet.
    #[error("names a migration whose secret this side does not know")]
    UnknownMigration,
    /// Its proof was made with another secret, or over another TLS session.
    #[error("has no proof that it comes from the migration's source")]
    NoProof,
    /// TLS 1.2: the proof cannot be bound to the session.
    #[error("came over a TLS session that cannot be identified")]
    UnidentifiedSession,
}

/// Why this side refused a new connection.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BadConnection {
    /// The first bytes did not arrive within the time limit.
    #[error("did not identify itself in time")]
    Silent,
    /// The first bytes belong to no protocol that this side knows.
    #[error("its first bytes {first:02x?} do not begin a migration channel")]
    UnknownMagic {
        /// The first bytes.
        first: Vec<u8>,
    },
    /// Another connection was complete first.
    #[error("another main channel was used when all channels had connected")]
    Displaced,
    /// The channel that it claims to be exists.
    #[error("it claims to be {role}, which is connected already; check whether another source migrates here")]
    Taken {
        /// The claimed channel.
        role: ChannelRole,
    },
    /// A preempt channel of a session that has ended.
    #[error("an old preempt channel came, of a connection that is lost")]
    OldPreempt,
    /// A preempt channel without the capability.
    #[error("a preempt channel came, and postcopy-preempt is off here")]
    PreemptIsOff,
    /// A preempt channel without a valid proof.
    #[error("a preempt channel is not this migration's")]
    ForeignPreempt,
    /// A preempt channel, and the handover section with the secret did not arrive in time.
    #[error("a preempt channel came, and the migration has no secret")]
    PreemptWithoutSecret,
    /// Too many connections want to write to a standby's disks and have not chosen one.
    #[error("too many connections for disks")]
    TooManyDisks,
    /// An NBD client of a standby's disk server negotiates without end.
    #[error("more than {most} options before a disk was chosen")]
    TooManyOptions {
        /// The limit.
        most: usize,
    },
    /// A disk of a standby is connected after the seeding.
    #[error(
        "disk {disk} can only be connected before the guest comes: end the protection, and protect the guest again"
    )]
    LateDisk {
        /// Name of the disk.
        disk: String,
    },
    /// Primary and standby could not greet each other.
    #[error("{0}")]
    Contact(#[source] Cause),
}

/// Why a source that reconnects was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadComeback {
    /// It does not prove that it is the migration's source.
    #[error(transparent)]
    Unproven(#[from] Unproven),
    /// This side does not wait for lost connections.
    #[error("is not waited for: x-sterna-reconnect-window is 0 here")]
    NoWindow,
    /// This side has no record of the rounds that it has read.
    #[error("is not waited for")]
    NotAwaited,
    /// A newer session has come, or the same one twice.
    #[error("has an old number: its connection is an old one, or comes twice")]
    OldNumber,
    /// A multifd channel that does not fit its session.
    #[error("brings a multifd channel {0}")]
    Lane(#[from] BadLane),
    /// This side has not begun to receive.
    #[error("is too early")]
    TooEarly,
    /// A newer connection has come.
    #[error("is too late: a newer one has come")]
    Superseded,
    /// A newer connection has come, or the migration has ended.
    #[error("is too late: a newer one has come, or the migration is over")]
    SupersededOrOver,
    /// A newer connection has come, or all pages of postcopy are in place.
    #[error("is too late: a newer connection has come, or no page is missing")]
    SupersededOrComplete,
    /// This side has given the migration up.
    #[error("is too late: the migration has been given up")]
    GivenUp,
    /// The lost connection's channels were still read at the end of the time limit.
    #[error("could not be let in in time")]
    NotInTime,
    /// The source has closed the connection.
    #[error("went away before it was answered")]
    WentAway,
    /// A recovery of postcopy, and this side has no guest that waits for pages.
    #[error("wants to continue in postcopy, but no guest lacks pages here")]
    LacksNoPages,
    /// A preempt channel without a session.
    #[error("brings a preempt channel that no session waits for")]
    UnexpectedPreempt,
    /// The machine that decides about the guest refuses the recovery.
    #[error("{0}")]
    Refused(#[source] Refusal),
}

/// Why a multifd channel does not fit the session that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadLane {
    /// The session has begun, or its main channel has not come.
    #[error("of a session that is not about to begin")]
    UnknownSession,
    /// The number is larger than this side's number of channels.
    #[error("with a number that this side does not use")]
    UnknownNumber,
    /// The channel has connected before.
    #[error("that has come before")]
    Again,
}

/// Why a status question gets no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadQuestion {
    /// It does not prove that it comes from the migration's source.
    #[error(transparent)]
    Unproven(#[from] Unproven),
    /// This side's parameters leave the answer to an operator.
    #[error("gets no answer, because this side leaves the answer to an operator: decide at the source")]
    LeftToOperator,
    /// This side knows nothing about the migration's guest.
    #[error("is about an unknown migration")]
    UnknownMigration,
}
