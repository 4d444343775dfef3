//! Why there is no contact.

use std::time::Duration;

use sterna_proto::replica::BadTerms;
use sterna_transport::TransportError;
use sterna_wire::WireError;

/// Why there is no contact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContactError {
    /// The connection failed or ended.
    #[error("the connection between primary and standby: {0}")]
    Transport(#[from] TransportError),
    /// The peer broke the format.
    #[error("what primary and standby say to each other: {0}")]
    Wire(#[from] WireError),
    /// The peer does not know the secret.
    #[error("{peer} does not know this protection's secret: give both sides the same one")]
    Stranger {
        /// Who.
        peer: String,
    },
    /// This side's arbiter cannot be asked.
    #[error("{0}; nothing has begun")]
    Arbiter(String),
    /// The two sides ask two arbiters, and both could win.
    #[error(
        "the primary's arbiter is {primary}, and the standby's {standby}: {why}. Both could win, and the guest would run twice, so nothing has \
         begun: give both sides one arbiter"
    )]
    TwoArbiters {
        /// What the primary's operator calls its arbiter.
        primary: String,
        /// What the standby's operator calls its arbiter.
        standby: String,
        /// How that is known.
        why: &'static str,
    },
    /// No protection can live with these times.
    #[error("the times of the protection: {0}")]
    Terms(#[from] BadTerms),
    /// A time is too long to be said.
    #[error("{what} of {} s is too long: at most {} s", value.as_secs(), u32::MAX / 1_000_000)]
    TooLong {
        /// Which.
        what: &'static str,
        /// How long.
        value: Duration,
    },
    /// The host refuses a thread.
    #[error("the host refuses a thread: {0}; nothing has begun")]
    Thread(String),
    /// The operating system gives no random numbers.
    #[error("no protection can begin: {0}")]
    Random(String),
}
