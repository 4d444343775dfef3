//! Answers and requests of a destination that do not fit what the source sent.

use sterna_proto::source::State;
use sterna_wire::return_path::ReturnMessage;

/// A destination's answer or request that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadAnswer {
    /// An answer that is forbidden in this state of the handover.
    #[error("it sent an answer without a question")]
    Unasked,
    /// The answer to *prepare*, which was not sent.
    #[error("it answered *prepare* without a question, in state {0:?}")]
    Prepare(State),
    /// The report of the guest's start, before RUN.
    #[error("it said that the guest was started, and the source had not sent RUN")]
    Started,
    /// A PONG to a PING that was not sent, or not at this time.
    #[error(
        "the destination answered PING {ping:#x} {}",
        if *is_known { "before or after its time" } else { "which was never sent" }
    )]
    Pong {
        /// Number of the PING.
        ping: u32,
        /// Whether the source sends this PING at another time.
        is_known: bool,
    },
    /// A request for pages outside postcopy.
    #[error("the return path carried a request for pages, which belongs to postcopy")]
    RequestWithoutPostcopy,
    /// A request for pages before LISTEN, or before the recovery is complete.
    #[error("the destination wants pages before LISTEN, or before the recovery (specs/postcopy.md §3)")]
    EarlyRequest,
    /// The first request of a connection names no block.
    #[error("the destination wants pages without naming a block first (specs/postcopy.md §3)")]
    RequestWithoutBlock,
    /// A message about a block that does not exist.
    #[error(
        "the destination wants or has pages of block {block:?}, and there is none (specs/postcopy.md §3)"
    )]
    UnknownBlock {
        /// Name of the block.
        block: String,
    },
    /// A request for pages that do not exist.
    #[error(
        "the destination wants {length:#x} bytes at {start:#x} of block {block:?}: {why} (specs/postcopy.md §3)"
    )]
    Request {
        /// Name of the block.
        block: String,
        /// First byte.
        start: u64,
        /// Number of bytes.
        length: u64,
        /// What is wrong with the range.
        #[source]
        why: BadRequest,
    },
    /// A message of a recovery, and none is under way.
    #[error("the return path carried {0:?}, which belongs to a recovery")]
    NoRecovery(Box<ReturnMessage>),
    /// A bitmap of received pages without a request.
    #[error("the destination sent a received bitmap, and the source had not asked for it")]
    UnaskedBitmap,
    /// The destination resumes without the command.
    #[error("the destination says that it resumes, and the source had not sent POSTCOPY_RESUME")]
    UnaskedResume,
    /// The destination is complete before the source has sent everything.
    #[error("the destination says that it has everything, before it was sent")]
    EarlyEnd,
    /// A destination that recovers has a page that the source has never sent.
    #[error(
        "the destination says that it has page {offset:#x} of block {block:?}, which was never sent: it is not the one that \
         got this guest (specs/postcopy.md §5)"
    )]
    NeverSent {
        /// Name of the block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// More rounds confirmed than sent.
    #[error("it confirmed round {round} of {begun} (specs/extension.md §13)")]
    Confirmed {
        /// Number of the confirmed round.
        round: u64,
        /// Rounds that have begun.
        begun: u64,
    },
    /// A destination that reconnects has read rounds that were not sent, or has forgotten some.
    #[error(
        "it says that it has read {rounds} rounds of session {session}; {begun} of session {current} were sent, of which it \
         had confirmed {confirmed} (specs/extension.md §13)"
    )]
    Holds {
        /// Rounds that it says to have read.
        rounds: u64,
        /// Their session.
        session: u32,
        /// Rounds that the source has sent.
        begun: u64,
        /// Their session.
        current: u32,
        /// Rounds that the destination has confirmed.
        confirmed: u64,
    },
    /// A destination that reconnects has pages of a session without pages.
    #[error("it says that pages came in session {session}, in which none was sent (specs/extension.md §13)")]
    HoldsOfEmptySession {
        /// Number of the session.
        session: u32,
    },
    /// A destination that recovers reports rounds, which belong to precopy, or another session.
    #[error(
        "it lets session {admitted} in and says that it has read {rounds} rounds of session {session} (specs/extension.md \
         §14)"
    )]
    HoldsInRecovery {
        /// The source's session.
        admitted: u32,
        /// Rounds that the destination says to have read.
        rounds: u64,
        /// Their session.
        session: u32,
    },
    /// A destination that has started the guest says that it never runs it.
    #[error("it says that it never runs the guest, which it has started")]
    NeverRuns,
    /// The destination of a reconnection has no proof.
    #[error("the peer that answers at {address} does not know the migration's secret")]
    NoProof {
        /// The address that the source has dialled.
        address: String,
    },
    /// The answer to a status question has no proof.
    #[error(
        "the peer that answers at {address} whether the guest runs does not know the migration's secret: the answer is not \
         believed"
    )]
    NoProofOfStatus {
        /// The address that the source has asked.
        address: String,
    },
}

/// Why requested pages do not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRequest {
    /// Start or length is not a multiple of the page size.
    #[error("it is not a whole number of pages")]
    Unaligned,
    /// The length is 0 bytes.
    #[error("it is empty")]
    Empty,
    /// The request reaches beyond the end of the block.
    #[error("the block has only {block_bytes:#x} bytes")]
    Outside {
        /// The block's length in bytes.
        block_bytes: u64,
    },
}
