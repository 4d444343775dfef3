//! What can go wrong with a channel, and at which byte of it.

use std::fmt;
use std::io;
use std::time::Duration;

use sterna_ram::{RamFault, is_failed_memory};

/// Which way bytes were moving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the peer to us.
    Read,
    /// From us to the peer.
    Write,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Read => "reading",
            Direction::Write => "writing",
        })
    }
}

/// A channel, a listener or a page file failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The text is no address.
    #[error("{text:?} is not an address: {rule}")]
    Address {
        /// What was given.
        text: String,
        /// What an address looks like.
        rule: &'static str,
    },
    /// No connection came about: refused, unreachable, unknown host.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where to.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Where.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// Nobody answered a connect, or came to a listener, within the limit.
    #[error("{what} {address}: no progress for {after:?}")]
    TimedOut {
        /// "connecting to" or "accepting on".
        what: &'static str,
        /// The address.
        address: String,
        /// The limit.
        after: Duration,
    },
    /// The peer closed its side in an orderly way, before the bytes that were due.
    #[error("{channel}: the peer closed at byte {offset}, {missing} bytes too early")]
    Closed {
        /// The channel.
        channel: String,
        /// Bytes moved in this direction before.
        offset: u64,
        /// Bytes that were still awaited.
        missing: u64,
    },
    /// The connection broke: the peer died, refused our bytes, or the network gave up.
    #[error("{channel}: connection broken while {direction} at byte {offset}: {source}")]
    Reset {
        /// The channel.
        channel: String,
        /// Which way bytes were moving.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// The kernel's word for it.
        source: io::Error,
    },
    /// The peer is there but moved nothing for longer than the stall limit.
    #[error("{channel}: no progress for {after:?} while {direction} at byte {offset}")]
    Stalled {
        /// The channel.
        channel: String,
        /// Which way bytes were moving.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// The stall limit.
        after: Duration,
    },
    /// No TLS session came about, or it broke.
    #[error("{channel}: {problem}")]
    Tls {
        /// The channel.
        channel: String,
        /// What is wrong, whose fault it is, and what to do.
        problem: crate::TlsProblem,
    },
    /// An RDMA connection, its adapter or its memory failed.
    #[error("{channel}: {direction} failed at byte {offset}: {source}")]
    Rdma {
        /// The channel.
        channel: String,
        /// Which way bytes were moving.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// What failed, and what to do.
        source: crate::rdma::RdmaError,
    },
    /// A message that carries the channel's bytes broke a rule.
    #[error("{channel}: {direction} failed at byte {offset}: {source}")]
    Protocol {
        /// The channel.
        channel: String,
        /// Which way bytes were moving.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// Which rule, and whose fault it is.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// We ourselves shut the channel down, or cancelled the wait.
    #[error("{channel}: cancelled from this side")]
    Cancelled {
        /// The channel, or the address that was waited for.
        channel: String,
    },
    /// A page file ends too early.
    #[error("{file}: the file ends at byte {offset}, {missing} bytes too early")]
    FileEnd {
        /// The file.
        file: String,
        /// Where it ends.
        offset: u64,
        /// Bytes that were still awaited.
        missing: u64,
    },
    /// There is no room for what was to be written: the disk, a quota or a limit.
    #[error("{file}: no space at byte {offset} ({source}): free space, or choose another place")]
    DiskFull {
        /// The file.
        file: String,
        /// Where the bytes were to go; 0 if that is not known.
        offset: u64,
        /// The kernel's word for it.
        source: io::Error,
    },
    /// A file lies in the place already, and nobody said that it may be replaced.
    #[error("{file} exists: choose another name, or ask to replace it")]
    FileExists {
        /// The file.
        file: String,
    },
    /// The path names no file, where only a file will do.
    #[error("{file} cannot hold pages: {what}")]
    NotAFile {
        /// The path.
        file: String,
        /// What is there.
        what: String,
    },
    /// Direct I/O was required and cannot be had.
    #[error("{file}: no direct I/O here ({why}): leave direct I/O off, or choose another file system")]
    NoDirect {
        /// The file.
        file: String,
        /// Why not.
        why: String,
    },
    /// A page of guest RAM has failed: it is known to, or a copy of ours found it.
    #[error("{channel}: {fault}")]
    FailedMemory {
        /// The channel or file that its bytes were for, or came from.
        channel: String,
        /// Where it is.
        fault: RamFault,
    },
    /// This machine's kernel refused.
    #[error("{channel}: {call} failed: {source}")]
    System {
        /// The channel, listener or file.
        channel: String,
        /// The system call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl TransportError {
    /// Whether we ended it ourselves: no fault of the peer or the network.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, TransportError::Cancelled { .. })
    }

    /// Whether memory that was to be read or written could not be had: a page of guest RAM has failed (poison).
    pub fn is_failed_memory(&self) -> bool {
        match self {
            TransportError::FailedMemory { .. } => true,
            TransportError::System { source, .. } => is_failed_memory(source),
            _ => false,
        }
    }

    /// The address in this process of the page of guest RAM that has failed, where it is known: the kernel does not say
    /// which page failed under its own access.
    pub fn failed_address(&self) -> Option<usize> {
        let TransportError::FailedMemory { fault, .. } = self else { return None };
        Some(fault.address)
    }

    /// Whether the peer is gone or the network between us is broken.
    pub fn is_peer_gone(&self) -> bool {
        matches!(self, TransportError::Closed { .. } | TransportError::Reset { .. })
    }
}
