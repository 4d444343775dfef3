//! What can go wrong with RDMA, and what to do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use super::{CompletionStatus, Event};

/// An adapter, a connection or a registration failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The user-space libraries are not installed.
    #[error(
        "{library} cannot be loaded ({why}): install the packages libibverbs1, librdmacm1 and ibverbs-providers"
    )]
    NoLibrary {
        /// Which one.
        library: String,
        /// What the loader said.
        why: String,
    },
    /// No device leads to the address, or serves it.
    #[error("no RDMA device serves {address}: {}", usable(.having))]
    NoDevice {
        /// What was asked for.
        address: String,
        /// Addresses of this host that have a device.
        having: Vec<String>,
    },
    /// No way to the address.
    #[error(
        "cannot resolve the {what} to {address} ({why}): check that both hosts' RDMA ports are up and in one network"
    )]
    Resolve {
        /// "address" or "route".
        what: &'static str,
        /// Where to.
        address: String,
        /// What the connection manager or the kernel said.
        why: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on rdma:{address}: {source}")]
    Bind {
        /// Where.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// The peer, or the system in its place, refused the connection.
    #[error("{peer} rejected the connection: {reason}")]
    Rejected {
        /// Who.
        peer: String,
        /// Why.
        reason: RejectReason,
        /// What it said; empty if it said nothing. Bytes beyond those that it sent may be anything.
        private_data: Vec<u8>,
    },
    /// More private data than the connection manager carries: a fault of the caller.
    #[error("{len} bytes of private data in a {what}, which holds {limit} at most")]
    PrivateData {
        /// The message: "request", "reply" or "reject".
        what: &'static str,
        /// Bytes given.
        len: usize,
        /// Bytes that fit.
        limit: usize,
    },
    /// Nothing came within the limit.
    #[error("{what} {address}: no progress for {after:?}")]
    TimedOut {
        /// What was waited for: "resolving", "connecting to", "accepting on", "accepting the
        /// request of" or "waiting for completions from".
        what: &'static str,
        /// The address.
        address: String,
        /// The limit.
        after: Duration,
    },
    /// We ourselves cancelled the wait.
    #[error("rdma:{address}: cancelled from this side")]
    Cancelled {
        /// The address that was waited for.
        address: String,
    },
    /// The connection has ended, or its queue pair was destroyed from this side (`event` is `None`).
    #[error("rdma:{peer}: {}", ended(.event.as_ref()))]
    Ended {
        /// The peer.
        peer: String,
        /// What ended it.
        event: Option<Event>,
    },
    /// A request that was posted has failed. The connection is of no further use.
    #[error("rdma:{peer}: {operation}{} ended with \"{status}\"", to_address(.remote_address))]
    Failed {
        /// The peer.
        peer: String,
        /// "a send", "a write" or "a receive".
        operation: &'static str,
        /// How it ended.
        status: CompletionStatus,
        /// Of a write, the first address in the peer's process.
        remote_address: Option<u64>,
    },
    /// A message does not fit its buffer: a fault of the caller.
    #[error("a message of {len} bytes, and the longest has {limit}")]
    MessageTooLong {
        /// Its bytes.
        len: usize,
        /// Bytes that fit.
        limit: usize,
    },
    /// There is no place in the queue: a fault of the caller, who counts its requests.
    #[error("rdma:{peer}: the {queue} queue is full after {posted} requests")]
    QueueFull {
        /// The peer.
        peer: String,
        /// "send" or "receive".
        queue: &'static str,
        /// How many of this call's requests were posted.
        posted: usize,
    },
    /// The process may not pin that much memory.
    #[error(
        "registering {wanted} bytes: {pinned} bytes are pinned and the locked-memory limit is {limit} bytes: raise it \
         (ulimit -l, LimitMEMLOCK= of the service), or lower x-sterna-rdma-pinned-limit"
    )]
    LockedMemory {
        /// Bytes of this registration.
        wanted: u64,
        /// Bytes pinned before.
        pinned: u64,
        /// The limit.
        limit: u64,
    },
    /// The adapter or the kernel refused a registration.
    #[error("cannot register {len} bytes at host address {address:#x}: {source}")]
    Registration {
        /// The first byte.
        address: u64,
        /// How many.
        len: u64,
        /// Why not.
        source: io::Error,
    },
    /// This machine's kernel, library or adapter refused.
    #[error("rdma:{subject}: {call} failed: {source}")]
    System {
        /// The peer, device or address that it was for.
        subject: String,
        /// The call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl RdmaError {
    /// Whether we ended it ourselves.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, RdmaError::Cancelled { .. } | RdmaError::Ended { event: None, .. })
    }

    /// Whether this host refused what this side wanted: its adapter, kernel, libraries or limits.
    pub fn is_local(&self) -> bool {
        match self {
            RdmaError::NoLibrary { .. }
            | RdmaError::NoDevice { .. }
            | RdmaError::Bind { .. }
            | RdmaError::PrivateData { .. }
            | RdmaError::MessageTooLong { .. }
            | RdmaError::QueueFull { .. }
            | RdmaError::LockedMemory { .. }
            | RdmaError::Registration { .. }
            | RdmaError::System { .. } => true,
            RdmaError::Resolve { .. }
            | RdmaError::Rejected { .. }
            | RdmaError::TimedOut { .. }
            | RdmaError::Cancelled { .. }
            | RdmaError::Ended { .. }
            | RdmaError::Failed { .. } => false,
        }
    }

    /// Whether the peer is gone or the network between us is broken.
    pub fn is_end(&self) -> bool {
        use CompletionStatus::{RetryExceeded, WorkRequestFlushed};
        match self {
            RdmaError::Ended { event, .. } => event.is_some(),
            RdmaError::Failed { status, .. } => matches!(status, RetryExceeded | WorkRequestFlushed),
            _ => false,
        }
    }
}

/// Why a connection was rejected: the reason of the InfiniBand connection manager, which is the status of the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RejectReason(pub i32);

impl RejectReason {
    /// Nobody listens there.
    pub const NO_LISTENER: Self = Self(8);
    /// The peer's program refused.
    pub const BY_PEER: Self = Self(28);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NO_LISTENER => f.write_str("nobody listens on that port (status 8)"),
            Self::BY_PEER => f.write_str("the peer's program refused, and its log says why (status 28)"),
            Self(status) => write!(f, "status {status}"),
        }
    }
}

fn usable(having: &[String]) -> String {
    if having.is_empty() {
        return "this host has no RDMA device that is up; `sterna rdma` says what is missing".to_owned();
    }
    format!("use an address that has a device: {}", having.join(", "))
}

fn to_address(address: &Option<u64>) -> String {
    address.map_or_else(String::new, |address| format!(" to address {address:#x} of the peer"))
}

fn ended(event: Option<&Event>) -> String {
    event.map_or_else(|| "the queue pair was destroyed from this side".to_owned(), ToString::to_string)
}
