//! Work requests and their completions, in the terms of verbs.

use std::fmt;

use super::memory::Piece;

/// A request for the send queue: a send or a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest {
    /// Number chosen by the caller; the completion contains it.
    pub id: u64,
    /// The operation to execute.
    pub operation: Operation,
    /// The bytes to send or write. A piece of length 0 needs no registration ([`Piece::EMPTY`]).
    pub from: Piece,
    /// Whether success produces a completion. Failure always does.
    pub is_signalled: bool,
}

/// Destination of a request's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Stores the bytes in the peer's next receive.
    Send,
    /// Writes the bytes to the peer's memory.
    Write {
        /// Destination address in the peer's process.
        address: u64,
        /// Remote key of the peer's registration.
        rkey: u32,
    },
    /// As `Write`, and then completes the peer's next receive, without storing bytes in it.
    WriteWithImmediate {
        /// Destination address in the peer's process.
        address: u64,
        /// Remote key of the peer's registration.
        rkey: u32,
        /// Value in the peer's completion.
        immediate: u32,
    },
}

/// Result of a finished request or receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number that the request or receive was posted with.
    pub id: u64,
    /// Success or error. After an error only `id` and `status` are meaningful.
    pub status: CompletionStatus,
    /// The kind of operation.
    pub kind: CompletionKind,
    /// Bytes received. For a receive that a write with immediate completed: bytes written.
    pub bytes: u32,
}

/// Kind of a finished operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionKind {
    /// A send of this side.
    Send,
    /// A write of this side, with or without immediate.
    Write,
    /// A receive that contains a message of the peer.
    Receive,
    /// A receive that a write with immediate completed, with the immediate.
    ReceiveImmediate(u32),
}

/// Status of a finished request, as in verbs (`ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionStatus {
    /// The request was executed.
    Success,
    /// The message is longer than the receive, or than the port allows.
    LocalLength,
    /// The request is invalid for the local queue pair.
    LocalQueuePairOperation,
    /// The local key, address or length is wrong.
    LocalProtection,
    /// The request was not executed. An earlier one failed, or the queue pair entered the error state.
    WorkRequestFlushed,
    /// The local adapter could not store the bytes that the peer sent.
    LocalAccess,
    /// The peer's adapter rejected the request as invalid. Its queue pair may allow no writes.
    RemoteInvalidRequest,
    /// The peer's adapter rejected the key, the address or the length.
    RemoteAccess,
    /// The peer's adapter failed to execute the request.
    RemoteOperation,
    /// The peer's adapter did not acknowledge; all retries are used up.
    RetryExceeded,
    /// The peer had no receive posted; all retries are used up.
    RnrRetryExceeded,
    /// Another status of verbs, by its number.
    Other(u32),
}

impl CompletionStatus {
    /// All statuses with a name, with their numbers in verbs.
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

    /// The status with the number `number` in verbs.
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
