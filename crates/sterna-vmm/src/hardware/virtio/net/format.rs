//! What driver and device agree on.

/// Queues: what the guest receives, what it sends, and what it asks for.
pub(super) const RECEIVE: usize = 0;
pub(super) const SEND: usize = 1;
pub(super) const CONTROL: usize = 2;
/// Before each packet, in the queues and in the tap alike.
pub(super) const HEADER_BYTES: usize = 12;
/// The status in the configuration space, after the address of 6 bytes.
pub(super) const STATUS_AT: usize = 6;
pub(super) const LINK_UP: u8 = 1;
pub(super) const ANNOUNCE: u8 = 2;
