//! Why a migration ended although no side is known to be at fault.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::TransportError;

use crate::error::lower::Cause;

/// Why a connection or a migration ended. The peer's process, the network or an operator may be the cause.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Ending {
    /// The connection was lost, and no thread has recorded how.
    #[error("the connection was lost")]
    Lost,
    /// The reason for which the destination gave a lost connection up.
    #[error("{0}")]
    LostBecause(String),
    /// A flush that the multifd channels do not complete, of a source that may reconnect.
    #[error("{0}")]
    Round(#[source] Cause),
    /// The source closed the main channel inside a message.
    #[error("the source closed the main channel early: {message}, byte {offset}")]
    EarlyEnd {
        /// The incomplete message.
        message: &'static str,
        /// Position of its end in the channel.
        offset: u64,
    },
    /// A file with a stream ends inside a message.
    #[error("{file} ends early: {message}, byte {offset}")]
    FileEndsEarly {
        /// Address of the file.
        file: String,
        /// The incomplete message.
        message: &'static str,
        /// Length of the file.
        offset: u64,
    },
    /// The main channel ended inside a page.
    #[error("the main channel ended inside a page, at byte {offset}")]
    InsidePage {
        /// Position of the page in the channel.
        offset: u64,
    },
    /// The main channel ended inside the package of postcopy.
    #[error("the main channel ended inside the package, at byte {offset}")]
    InsidePackage {
        /// Position of the end in the channel.
        offset: u64,
    },
    /// The preempt channel ended inside a record.
    #[error("the preempt channel ended inside a record, at byte {offset}")]
    InsideRecord {
        /// Position of the record in the channel.
        offset: u64,
    },
    /// A multifd channel ended in postcopy before its last SYNC packet.
    #[error("multifd channel {channel} ended before its last SYNC in postcopy")]
    NoLastSync {
        /// Number of the channel.
        channel: usize,
    },
    /// A connection ended before its first bytes.
    #[error("{peer}: closed before it identified itself")]
    BeforeGreeting {
        /// Address of the peer.
        peer: String,
    },
    /// The source closed the main channel before it handed the guest over.
    #[error("the source closed the main channel before it committed")]
    BeforeCommit,
    /// The source closed the main channel before the destination had reported the guest's start.
    #[error("the source closed the main channel before the acknowledgement")]
    BeforeAcknowledgement,
    /// The source has ended the migration and does not reconnect.
    #[error("the source has given the migration up")]
    GivenUp,
    /// The source asks about its guest on a new connection.
    #[error("the source has noticed that the connection is lost, and asks what became of its guest")]
    SourceAsks,
    /// The source has made a new connection.
    #[error("the source has noticed that the connection is lost, and connects again")]
    SourceReconnects,
    /// The primary closed the connection inside the devices' state of a checkpoint.
    #[error("the primary closed the main channel after {came} of {bytes} bytes of device state")]
    InsideDeviceState {
        /// Bytes that came.
        came: u64,
        /// Length of the state.
        bytes: u64,
    },
    /// The primary closed the connection before the first checkpoint.
    #[error(
        "the primary closed the connection and never asked for a checkpoint: if x-colo was off there, it has let go of its \
         guest, and this standby has the only copy"
    )]
    NoCheckpoint,
    /// The primary closed the connection between two checkpoints.
    #[error("the primary closed the connection between two checkpoints")]
    BetweenCheckpoints,
    /// The primary closed the connection inside a checkpoint.
    #[error("the primary closed the connection inside a checkpoint, which is dropped")]
    InsideCheckpoint,
    /// The destination closed the return path.
    #[error("the destination closed the return path after {offset} bytes{}", advice(*offset, *is_tls))]
    ReturnPath {
        /// Bytes that the destination sent.
        offset: u64,
        /// Whether the connection uses TLS.
        is_tls: bool,
    },
    /// The destination does not answer while the guest is paused.
    #[error("the destination answers no keep-alive, and the guest is paused")]
    NoKeepAlive,
    /// The destination closed the main channel while multifd channels were opened.
    #[error(
        "the destination closed the main channel within {:.1} s, while {channels} multifd channels were being connected: its log \
         says why. If it did not wait long enough for the main channel's first bytes, use fewer multifd channels",
        after.as_secs_f64()
    )]
    WhileConnecting {
        /// Number of multifd channels.
        channels: usize,
        /// Time since the main channel was opened.
        after: Duration,
    },
    /// The destination of a recovery closed the connection without an answer.
    #[error(
        "{peer}: the destination did not let this side in ({error}); its log says why: it must be postcopy-paused and have \
         taken part in this migration"
    )]
    NotAdmitted {
        /// Address of the destination.
        peer: String,
        /// How the connection ended.
        #[source]
        error: Arc<TransportError>,
    },
    /// The destination of a served image closed the connection.
    #[error("{peer}: the destination closed the connection")]
    ServedConnection {
        /// Address of the destination.
        peer: String,
    },
    /// The destination closed the connection over which it was offered memory.
    #[error("the destination closed the memory connection without an answer: see its log")]
    NoMemoryAnswer,
    /// The destination will never run the guest.
    #[error("the destination answered that it does not run the guest and never will")]
    NeverThere,
    /// An operator decided an undecided migration.
    #[error("an operator decided that the source runs the guest")]
    OperatorDecided,
    /// An operator paused postcopy.
    #[error("an operator paused it (migrate-pause)")]
    OperatorPaused,
    /// The destination of a descriptor cannot be asked.
    #[error(
        "a descriptor cannot be connected again: check whether the guest runs at the destination, and decide"
    )]
    DescriptorNotAsked,
    /// This side's parameters leave the question to an operator.
    #[error(
        "this side leaves the question to an operator: check whether the guest runs at the destination, and decide"
    )]
    QuestionLeftToOperator,
    /// A connection over RDMA could not be established.
    #[cfg(feature = "rdma")]
    #[error("{peer}: {error}")]
    Rdma {
        /// Address of the peer.
        peer: String,
        /// The adapter's or the protocol's error.
        #[source]
        error: Arc<sterna_transport::StreamError>,
    },
    /// The destination's name could not be resolved for a question over RDMA.
    #[cfg(feature = "rdma")]
    #[error("{peer}: {why}")]
    NoAddress {
        /// Address of the destination.
        peer: String,
        /// The resolver's answer.
        why: String,
    },
}

/// What the operator examines after the destination has closed the return path.
fn advice(offset: u64, is_tls: bool) -> &'static str {
    match (offset, is_tls) {
        (0, true) => ": see its log for the reason, such as a certificate of this side that it refused",
        (0, false) => ": see its log; if it expects TLS, set TLS credentials here too",
        _ => "",
    }
}
