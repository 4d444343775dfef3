//! Errors of channels, listeners and page files. Each names the object and, where one exists, the byte offset.

use std::fmt;
use std::io;
use std::time::Duration;

use sterna_ram::{RamFault, is_failed_memory};

/// Direction of a transfer, for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the peer to this side.
    Read,
    /// From this side to the peer.
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

/// Advice for an operator whose file cannot grow.
fn make_room(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EFBIG) => {
            "raise this process's limit on the size of files (`ulimit -f`, systemd's LimitFSIZE=), or choose a file \
             system that supports larger files"
        }
        Some(libc::EDQUOT) => "free space, raise the quota, or choose another place",
        _ => "free space, or choose another place",
    }
}

/// Why a descriptor is not the needed socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorProblem {
    /// It is a file, a pipe or another object.
    #[error("it is not a socket")]
    NotSocket,
    /// It is a datagram socket.
    #[error("it is a datagram socket, which can lose bytes")]
    Datagram,
    /// It is a socket of another type than stream.
    #[error("it is not a stream socket")]
    NotStream,
    /// It is a socket of another family than IPv4, IPv6 and Unix.
    #[error("it is neither a TCP nor a Unix socket")]
    OtherFamily,
    /// It accepts no connections.
    #[error("it is not listening: call listen() on it first")]
    NotListening,
    /// It is connected to a peer.
    #[error("it is already connected: use Address::from_connected")]
    Connected,
    /// It has no peer.
    #[error("it is not connected")]
    NotConnected,
    /// It is a listening socket.
    #[error("it is listening: use Address::from_listener, or accept a connection first")]
    Listening,
    /// The kernel refused to describe it.
    #[error("the kernel does not describe it: {0}")]
    System(#[source] io::Error),
}

/// Failure of a channel, a listener or a page file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The given text is not a valid address.
    #[error("{text:?} is not an address: {rule}")]
    Address {
        /// The text that was given as an address.
        text: String,
        /// The rule of addresses that the text breaks.
        rule: &'static str,
    },
    /// A descriptor of the VMM cannot be used as an address.
    #[error("the descriptor is not {needed}: {why}")]
    Descriptor {
        /// The object that is needed.
        needed: &'static str,
        /// The difference.
        #[source]
        why: DescriptorProblem,
    },
    /// No connection could be established: refused, unreachable, unknown host.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address that was connected to.
        address: String,
        /// Error of the kernel or the resolver.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address to listen at.
        address: String,
        /// Error of the kernel or the resolver.
        source: io::Error,
    },
    /// No listener answered a connect, or no client connected to a listener, within the limit.
    #[error("{what} {address}: no progress for {after:?}")]
    TimedOut {
        /// The operation: "connecting to", "accepting on" or "TLS handshake with".
        what: &'static str,
        /// The address that was waited for.
        address: String,
        /// The limit that passed.
        after: Duration,
    },
    /// The peer closed its side in an orderly way before all expected bytes arrived.
    #[error("{channel}: the peer closed at byte {offset}, {missing} bytes too early")]
    Closed {
        /// Name of the channel.
        channel: String,
        /// Bytes moved in this direction before.
        offset: u64,
        /// Number of expected bytes that did not arrive.
        missing: u64,
    },
    /// The connection broke: the peer's process ended, it rejected bytes, or the network failed.
    #[error("{channel}: connection broken while {direction} at byte {offset}: {source}")]
    Reset {
        /// Name of the channel.
        channel: String,
        /// Direction of the failed call.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The connection exists, but no byte moved for longer than the stall limit.
    #[error("{channel}: no progress for {after:?} while {direction} at byte {offset}")]
    Stalled {
        /// Name of the channel.
        channel: String,
        /// Direction of the failed call.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// The stall limit of the channel.
        after: Duration,
    },
    /// The TLS handshake failed, or the session broke.
    #[error("{channel}: {problem}")]
    Tls {
        /// Name of the channel.
        channel: String,
        /// The problem, the responsible side and a remedy.
        problem: crate::tls::problem::TlsProblem,
    },
    /// An RDMA connection, its adapter or its memory failed.
    #[cfg(feature = "rdma")]
    #[error("{channel}: {direction} failed at byte {offset}: {source}")]
    Rdma {
        /// Name of the channel.
        channel: String,
        /// Direction of the failed call.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// The failed operation and a remedy.
        source: crate::rdma::RdmaError,
    },
    /// A message that contains the channel's bytes broke a rule of its protocol.
    #[error("{channel}: {direction} failed at byte {offset}: {source}")]
    Protocol {
        /// Name of the channel.
        channel: String,
        /// Direction of the failed call.
        direction: Direction,
        /// Bytes moved in this direction before.
        offset: u64,
        /// The rule and the side that broke it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This side shut the channel down or cancelled the wait.
    #[error("{channel}: cancelled from this side")]
    Cancelled {
        /// Name of the channel, or the address that was waited for.
        channel: String,
    },
    /// A page file ends before the requested bytes.
    #[error("{file}: the file ends at byte {offset}, {missing} bytes too early")]
    FileEnd {
        /// Path of the file.
        file: String,
        /// Length of the file in bytes.
        offset: u64,
        /// Number of requested bytes after the end.
        missing: u64,
    },
    /// A write found no space: a full disk, a quota or a file size limit.
    #[error("{file}: no space at byte {offset} ({source}): {}", make_room(source))]
    DiskFull {
        /// Path of the file.
        file: String,
        /// Offset of the write; 0 if it is unknown.
        offset: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file exists at the path, and replacing it was not requested.
    #[error("{file} exists: choose another name, or ask to replace it")]
    FileExists {
        /// Path of the existing file.
        file: String,
    },
    /// The path names a directory, pipe, socket or device where a file is needed.
    #[error("{file} cannot hold pages: {what}")]
    NotAFile {
        /// The path as given.
        file: String,
        /// The kind of object at the path.
        what: String,
    },
    /// Direct I/O was required and is not available.
    #[error(
        "{file}: direct I/O is not possible ({why}): leave direct I/O off, or choose another file system"
    )]
    NoDirect {
        /// Path of the file.
        file: String,
        /// Reason of the file system or the kernel.
        why: String,
    },
    /// A page of guest RAM has failed (memory error).
    ///
    /// It was already marked as failed, or a copy found it.
    #[error("{channel}: {fault}")]
    FailedMemory {
        /// Name of the channel or file that the page's bytes were for or came from.
        channel: String,
        /// Address of the failed page.
        fault: RamFault,
    },
    /// A system call of this host failed.
    #[error("{channel}: {call} failed: {source}")]
    System {
        /// Name of the channel, listener or file.
        channel: String,
        /// Name of the system call.
        call: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl TransportError {
    /// Whether this side ended the operation, so that neither the peer nor the network failed.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, TransportError::Cancelled { .. })
    }

    /// Whether a page of guest RAM to read or write has failed (memory error, poison).
    pub fn is_failed_memory(&self) -> bool {
        match self {
            TransportError::FailedMemory { .. } => true,
            TransportError::System { source, .. } => is_failed_memory(source),
            _ => false,
        }
    }

    /// Address in this process of the failed page of guest RAM.
    ///
    /// `None` if it is unknown: the kernel does not report which page failed during its own access.
    pub fn failed_address(&self) -> Option<usize> {
        let TransportError::FailedMemory { fault, .. } = self else { return None };
        Some(fault.address)
    }

    /// Whether the peer has closed or the network connection broke.
    pub fn is_peer_gone(&self) -> bool {
        matches!(self, TransportError::Closed { .. } | TransportError::Reset { .. })
    }
}
