//! The state changes of a queue pair that the kernel allows, for the tests' doubles. The queue pair is a reliable
//! connected one.
//!
//! This is the table of `ib_modify_qp_is_ok` for this type of queue pair (specs/rdma.md §11). The drivers of mlx4,
//! mlx5, hns, bnxt_re and irdma use it.

/// State of a queue pair, as in verbs (`enum ibv_qp_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueuePairState {
    /// Newly created, without any attributes.
    Reset,
    /// Initialised: receives may be posted.
    Init,
    /// Ready to receive: the adapter executes the peer's requests.
    ReadyToReceive,
    /// Ready to send: requests may be posted.
    ReadyToSend,
    /// Everything outstanding is flushed, and no request of the peer is executed.
    Error,
}

/// Attributes that a change contains, with the numbers of verbs (`enum ibv_qp_attr_mask`).
pub(crate) mod attribute {
    /// The state to change to.
    pub(crate) const STATE: u32 = 1;
    /// The state that the caller assumes.
    pub(crate) const CURRENT_STATE: u32 = 1 << 1;
    /// The rights of the peer.
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    /// Index of the partition key.
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    /// Number of the port.
    pub(crate) const PORT: u32 = 1 << 5;
    /// Address path to the peer.
    pub(crate) const PATH: u32 = 1 << 7;
    /// Payload bytes of a packet.
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    /// Maximum time until an acknowledgement.
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    /// Number of retransmissions of a packet.
    pub(crate) const RETRIES: u32 = 1 << 10;
    /// Number of retries of a send for which the peer has no receive.
    pub(crate) const RNR_RETRIES: u32 = 1 << 11;
    /// Number of the peer's first packet.
    pub(crate) const RECEIVE_NUMBER: u32 = 1 << 12;
    /// Number of reads that this side may have outstanding.
    pub(crate) const READS: u32 = 1 << 13;
    /// Alternate path to the peer.
    pub(crate) const OTHER_PATH: u32 = 1 << 14;
    /// Time that the peer waits before it retries a send without a receive.
    pub(crate) const RNR_TIMER: u32 = 1 << 15;
    /// Number of this side's first packet.
    pub(crate) const SEND_NUMBER: u32 = 1 << 16;
    /// Number of reads that this side answers in parallel.
    pub(crate) const ANSWERED_READS: u32 = 1 << 17;
    /// State of the migration to the alternate path.
    pub(crate) const MIGRATION_STATE: u32 = 1 << 18;
    /// Number of the peer's queue pair.
    pub(crate) const PEER: u32 = 1 << 20;
}

/// Attributes that the change to ReadyToReceive requires.
pub(crate) const TO_RECEIVE: u32 = attribute::STATE
    | attribute::PATH
    | attribute::PATH_MTU
    | attribute::PEER
    | attribute::RECEIVE_NUMBER
    | attribute::ANSWERED_READS
    | attribute::RNR_TIMER;
/// Attributes that the change to ReadyToSend requires.
pub(crate) const TO_SEND: u32 = attribute::STATE
    | attribute::TIMEOUT
    | attribute::RETRIES
    | attribute::RNR_RETRIES
    | attribute::SEND_NUMBER
    | attribute::READS;

/// Whether a queue pair in state `current` may change to `next` with the attributes `named`.
///
/// `next` is `current` if the change contains no state. A change that is not allowed is answered by EINVAL.
pub(crate) fn is_allowed(current: QueuePairState, next: QueuePairState, named: u32) -> bool {
    use QueuePairState::{Error, Init, ReadyToReceive, ReadyToSend, Reset};
    use attribute::{
        ACCESS_FLAGS, CURRENT_STATE, MIGRATION_STATE, OTHER_PATH, PKEY_INDEX, PORT, RNR_TIMER, STATE,
    };
    let (required, optional) = match (current, next) {
        (_, Reset | Error) if current != Reset || next == Reset => (0, 0),
        (Reset, Init) => (PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
        (Init, Init) => (0, PKEY_INDEX | PORT | ACCESS_FLAGS),
        (Init, ReadyToReceive) => (TO_RECEIVE & !STATE, OTHER_PATH | ACCESS_FLAGS | PKEY_INDEX),
        (ReadyToReceive, ReadyToSend) => {
            (TO_SEND & !STATE, CURRENT_STATE | OTHER_PATH | ACCESS_FLAGS | RNR_TIMER | MIGRATION_STATE)
        }
        (ReadyToSend, ReadyToSend) => {
            (0, CURRENT_STATE | ACCESS_FLAGS | OTHER_PATH | MIGRATION_STATE | RNR_TIMER)
        }
        _ => return false,
    };
    let is_current_known = matches!(current, ReadyToReceive | ReadyToSend);
    (named & CURRENT_STATE == 0 || is_current_known)
        && named & required == required
        && named & !(required | optional | STATE) == 0
}

#[cfg(test)]
mod tests {
    use super::QueuePairState::{Error, Init, ReadyToReceive, ReadyToSend, Reset};
    use super::attribute::{ACCESS_FLAGS, PKEY_INDEX, PORT, STATE};
    use super::*;

    const ALL: [QueuePairState; 5] = [Reset, Init, ReadyToReceive, ReadyToSend, Error];

    #[test]
    fn access_flags_alone_change_in_init_and_in_ready_to_send_only() {
        for state in ALL {
            assert_eq!(
                is_allowed(state, state, ACCESS_FLAGS),
                matches!(state, Init | ReadyToSend),
                "{state:?}"
            );
        }
    }

    #[test]
    fn error_is_reached_from_every_state_but_reset_with_nothing_else_named() {
        for state in ALL {
            assert_eq!(is_allowed(state, Error, STATE), state != Reset, "{state:?}");
            assert!(!is_allowed(state, Error, STATE | ACCESS_FLAGS), "{state:?}");
        }
    }

    #[test]
    fn connecting_takes_each_state_in_its_turn() {
        assert!(is_allowed(Reset, Init, STATE | PKEY_INDEX | PORT | ACCESS_FLAGS));
        assert!(
            is_allowed(Init, ReadyToReceive, TO_RECEIVE) && is_allowed(ReadyToReceive, ReadyToSend, TO_SEND)
        );
        assert!(
            !is_allowed(Init, ReadyToSend, TO_RECEIVE | TO_SEND) && !is_allowed(Error, ReadyToSend, TO_SEND)
        );
        assert!(!is_allowed(Init, ReadyToReceive, STATE) && !is_allowed(ReadyToReceive, ReadyToSend, STATE));
    }
}
