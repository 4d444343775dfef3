//! Work requests and their completions.

use std::fmt;

use super::Piece;

/// A request for the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest {
    /// Given back in the completion.
    pub id: u64,
    /// What to do.
    pub operation: Operation,
    /// The bytes; a piece of length 0 needs no registration ([`Piece::EMPTY`]).
    pub from: Piece,
    /// Whether success gives a completion. Failure always does.
    pub is_signalled: bool,
}

/// What a request does with its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Puts them into the peer's next receive.
    Send,
    /// Writes them into the peer's memory.
    Write {
        /// The address in the peer's process.
        address: u64,
        /// The key of the peer's registration.
        rkey: u32,
    },
    /// As `Write`, and then completes the peer's next receive, which gets no bytes.
    WriteWithImmediate {
        /// The address in the peer's process.
        address: u64,
        /// The key of the peer's registration.
        rkey: u32,
        /// What the peer's completion says.
        immediate: u32,
    },
}

/// A request or a receive that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The request's.
    pub id: u64,
    /// How it ended. If it failed, only `id` and this have meaning.
    pub status: CompletionStatus,
    /// What it was.
    pub kind: CompletionKind,
    /// Bytes received; of a receive that a write with immediate completed, bytes written.
    pub bytes: u32,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionKind {
    /// A send.
    Send,
    /// A write, with immediate or without.
    Write,
    /// A receive that a send filled.
    Receive,
    /// A receive that a write with immediate completed; the immediate.
    ReceiveImmediate(u32),
}

/// How a request ended: the statuses of verbs (`ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionStatus {
    /// It succeeded.
    Success,
    /// The message did not fit: longer than the receive, or than the port allows.
    LocalLength,
    /// The request made no sense to the local queue pair.
    LocalQueuePairOperation,
    /// The local key, address or length is wrong.
    LocalProtection,
    /// An earlier request failed, or the queue pair was put into the error state: not executed.
    WorkRequestFlushed,
    /// The local adapter could not store what the peer sent.
    LocalAccess,
    /// The peer's adapter refused it as invalid: writing is not allowed on its queue pair.
    RemoteInvalidRequest,
    /// The peer's adapter refused the key, the address or the length.
    RemoteAccess,
    /// The peer's adapter failed.
    RemoteOperation,
    /// The peer's adapter did not answer; all retries are used up.
    RetryExceeded,
    /// The peer had no receive posted; all retries are used up.
    RnrRetryExceeded,
    /// Another status of verbs, by its number.
    Other(u32),
}

impl CompletionStatus {
    /// All that have a name, with their numbers in verbs.
    const NAMED: [(CompletionStatus, u32, &'static str); 11] = [
        (Self::Success, 0, "success"),
        (Self::LocalLength, 1, "local length error"),
        (Self::LocalQueuePairOperation, 2, "local QP operation error"),
        (Self::LocalProtection, 4, "local protection error"),
        (Self::WorkRequestFlushed, 5, "work request flushed error"),
        (Self::LocalAccess, 8, "local access error"),
        (Self::RemoteInvalidRequest, 9, "remote invalid request error"),
        (Self::RemoteAccess, 10, "remote access error"),
        (Self::RemoteOperation, 11, "remote operation error"),
        (Self::RetryExceeded, 12, "transport retry counter exceeded"),
        (Self::RnrRetryExceeded, 13, "RNR retry counter exceeded"),
    ];

    /// The status with this number in verbs.
    pub fn from_verbs(number: u32) -> Self {
        let named = Self::NAMED.iter().find(|(_, of, _)| *of == number);
        named.map_or(Self::Other(number), |(status, ..)| *status)
    }

    /// Whether the request succeeded.
    pub fn is_success(self) -> bool {
        self == Self::Success
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Other(number) = self {
            return write!(f, "work completion status {number}");
        }
        let named = Self::NAMED.iter().find(|(status, ..)| status == self);
        f.write_str(named.map_or("unknown status", |(_, _, name)| name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_from_verbs_is_the_one_with_that_number() {
        for number in 0..32 {
            let status = CompletionStatus::from_verbs(number);
            let again =
                CompletionStatus::NAMED.iter().find(|(named, ..)| *named == status).map(|(_, n, _)| *n);
            assert_eq!(again.or(Some(number)), Some(number));
            assert_eq!(again.is_none(), status == CompletionStatus::Other(number), "{number}");
        }
        assert_eq!(CompletionStatus::from_verbs(13), CompletionStatus::RnrRetryExceeded);
        assert_eq!(CompletionStatus::from_verbs(21).to_string(), "work completion status 21");
    }
}
