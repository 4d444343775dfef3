//! Errors of the contact between primary and standby.

use std::time::Duration;

use sterna_proto::replica::BadTerms;
use sterna_transport::TransportError;
use sterna_wire::WireError;

/// Why primary and standby are not in contact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContactError {
    /// The connection failed or was closed.
    #[error("the connection between primary and standby: {0}")]
    Transport(#[from] TransportError),
    /// The peer's message breaks the format.
    #[error("what primary and standby say to each other: {0}")]
    Wire(#[from] WireError),
    /// The peer does not read its messages.
    #[error(
        "the connection between primary and standby takes no more messages: the peer has not read {unsent_bytes} bytes. Check that its \
         process runs"
    )]
    Unread {
        /// Bytes that wait in this host's socket buffer.
        unsent_bytes: u64,
    },
    /// The peer does not know the secret.
    #[error("{peer} does not know this protection's secret: give both sides the same one")]
    Stranger {
        /// Name of the peer.
        peer: String,
    },
    /// This side's arbiter cannot be asked.
    #[error("{0}; nothing has begun")]
    Arbiter(String),
    /// The sides ask different arbiters, and both could win a claim.
    #[error(
        "the primary's arbiter is {primary}, and the standby's {standby}: {why}. Both could win, and the guest would run twice, so nothing has \
         begun: give both sides one arbiter"
    )]
    TwoArbiters {
        /// Name of the primary's arbiter, as its operator has set it.
        primary: String,
        /// Name of the standby's arbiter, as its operator has set it.
        standby: String,
        /// The reason why the arbiters are considered different.
        why: &'static str,
    },
    /// The protection's times contradict each other.
    #[error("the times of the protection: {0}")]
    Terms(#[from] BadTerms),
    /// A time is too long for its field on the wire.
    #[error("{what} of {} s is too long: at most {} s", value.as_secs(), u32::MAX / 1_000_000)]
    TooLong {
        /// Name of the time.
        what: &'static str,
        /// Its value.
        value: Duration,
    },
    /// The watchdog cannot be armed.
    #[error("the watchdog: {0}")]
    Watchdog(String),
    /// The host cannot create a thread.
    #[error("the host refuses a thread: {0}; nothing has begun")]
    Thread(String),
    /// The operating system provides no random bytes.
    #[error("no protection can begin: {0}")]
    Random(String),
}
