//! Errors of RDMA, each with a remedy for the operator where one exists.

use std::fmt;
use std::io;
use std::time::Duration;

use super::event::Event;
use super::work::CompletionStatus;

/// Failure of an adapter, a connection or a registration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The user-space libraries are not installed.
    #[error(
        "{library} cannot be loaded ({why}): install the packages libibverbs1, librdmacm1 and ibverbs-providers"
    )]
    NoLibrary {
        /// Name of the library.
        library: String,
        /// Error of the dynamic loader.
        why: String,
    },
    /// No RDMA device of this host has or reaches the address.
    #[error("no RDMA device serves {address}: {}", usable(.having))]
    NoDevice {
        /// The address that was requested.
        address: String,
        /// Addresses of this host that have an RDMA device.
        having: Vec<String>,
    },
    /// The peer's address or the route could not be resolved.
    #[error(
        "cannot resolve the {what} to {address} ({why}): check that both hosts' RDMA ports are up and in one network"
    )]
    Resolve {
        /// The step that failed: "address" or "route".
        what: &'static str,
        /// The address of the peer.
        address: String,
        /// Error of the connection manager or the kernel.
        why: String,
    },
    /// The connection manager cannot listen on the address.
    #[error("cannot listen on rdma:{address}: {source}")]
    Bind {
        /// The address to listen on.
        address: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The peer, or the system on its behalf, refused the connection.
    #[error("{peer} rejected the connection: {reason}")]
    Rejected {
        /// Address of the peer.
        peer: String,
        /// Reason code of the refusal.
        reason: RejectReason,
        /// Private data of the reject message; empty without data. Bytes after the peer's own are undefined.
        private_data: Vec<u8>,
    },
    /// More private data than the connection manager can send: a bug of the caller.
    #[error("{len} bytes of private data in a {what}, which has room for at most {limit}")]
    PrivateData {
        /// The message: "request", "reply" or "reject".
        what: &'static str,
        /// Number of bytes given.
        len: usize,
        /// Maximum number of bytes.
        limit: usize,
    },
    /// The operation made no progress within the limit.
    #[error("{what} {address}: no progress for {after:?}")]
    TimedOut {
        /// The operation that was waited for.
        ///
        /// It is "resolving", "connecting to", "accepting on", "accepting the request of" or "waiting for
        /// completions from".
        what: &'static str,
        /// Address that the operation was for.
        address: String,
        /// The limit that passed.
        after: Duration,
    },
    /// This side cancelled the wait.
    #[error("rdma:{address}: cancelled from this side")]
    Cancelled {
        /// The address that was waited for.
        address: String,
    },
    /// The connection has ended. `event` is `None` if this side destroyed the queue pair.
    #[error("rdma:{peer}: {}", ended(.event.as_ref()))]
    Ended {
        /// Address of the peer.
        peer: String,
        /// The event that ended the connection.
        event: Option<Event>,
    },
    /// A posted request failed. The connection cannot be used any more.
    #[error("rdma:{peer}: {operation}{} ended with \"{status}\"", to_address(.remote_address))]
    Failed {
        /// Address of the peer.
        peer: String,
        /// The failed request: "a send", "a write" or "a receive".
        operation: &'static str,
        /// Status of the completion.
        status: CompletionStatus,
        /// For a write, the first destination address in the peer's process.
        remote_address: Option<u64>,
    },
    /// A message is longer than a buffer: a bug of the caller.
    #[error("a message of {len} bytes; the limit is {limit}")]
    MessageTooLong {
        /// Length of the message in bytes.
        len: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// The queue has no free slot. This is a bug of the caller, which must count its requests.
    #[error("rdma:{peer}: the {queue} queue is full after {posted} requests")]
    QueueFull {
        /// Address of the peer.
        peer: String,
        /// The full queue: "send" or "receive".
        queue: &'static str,
        /// Number of requests of this call that were posted.
        posted: usize,
    },
    /// The locked-memory limit of the process is too small for the registration.
    #[error(
        "registering {wanted} bytes: {pinned} bytes are pinned and the locked-memory limit is {limit} bytes: raise it \
         (ulimit -l, LimitMEMLOCK= of the service), or lower x-sterna-rdma-pinned-limit"
    )]
    LockedMemory {
        /// Number of bytes to register.
        wanted: u64,
        /// Bytes that were already pinned.
        pinned: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The adapter or the kernel refused a registration.
    #[error("cannot register {len} bytes at host address {address:#x}: {source}")]
    Registration {
        /// Address of the first byte.
        address: u64,
        /// Length of the memory in bytes.
        len: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A call of this host's kernel, library or adapter failed.
    #[error("rdma:{subject}: {call} failed: {source}")]
    System {
        /// The peer, device or address that the call was for.
        subject: String,
        /// Name of the call.
        call: &'static str,
        /// Error of the call.
        source: io::Error,
    },
}

impl RdmaError {
    /// Whether this side ended the operation itself.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, RdmaError::Cancelled { .. } | RdmaError::Ended { event: None, .. })
    }

    /// Whether the cause is on this host: adapter, kernel, libraries, limits, or a caller bug.
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

    /// Whether the peer has closed or the network connection broke.
    pub fn is_end(&self) -> bool {
        use CompletionStatus::{RetryExceeded, WorkRequestFlushed};
        match self {
            RdmaError::Ended { event, .. } => event.is_some(),
            RdmaError::Failed { status, .. } => matches!(status, RetryExceeded | WorkRequestFlushed),
            _ => false,
        }
    }
}

/// Reason of a rejected connection: the InfiniBand connection manager's code, which is the event's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RejectReason(pub i32);

impl RejectReason {
    /// No program listens on the port.
    pub const NO_LISTENER: Self = Self(8);
    /// The peer's program refused the connection.
    pub const BY_PEER: Self = Self(28);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NO_LISTENER => f.write_str("no process listens on that port (status 8)"),
            Self::BY_PEER => f.write_str(
                "the peer's program refused the connection; its log contains the reason \
                                          (status 28)",
            ),
            Self(status) => write!(f, "status {status}"),
        }
    }
}

fn usable(having: &[String]) -> String {
    if having.is_empty() {
        return "this host has no RDMA device that is up; `sterna rdma` shows what is missing".to_owned();
    }
    format!("use an address of an RDMA device: {}", having.join(", "))
}

fn to_address(address: &Option<u64>) -> String {
    address.map_or_else(String::new, |address| format!(" to address {address:#x} of the peer"))
}

fn ended(event: Option<&Event>) -> String {
    event.map_or_else(|| "the queue pair was destroyed from this side".to_owned(), ToString::to_string)
}
