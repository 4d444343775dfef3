//! What checkpoints work on.

use crate::outgoing::protection::Protecting;
use crate::outgoing::transfer::Transfer;

/// Checkpoints of the guest `transfer`, for the protection `protecting`.
pub(super) struct Checkpointing<'a> {
    pub(super) transfer: &'a mut Transfer,
    pub(super) protecting: &'a Protecting,
}
