//! What driver and device agree on.

/// Of each pair of queues the first is for what the guest receives, and the second for what it sends. What it asks for comes last.
pub(super) const RECEIVE: usize = 0;
pub(super) const SEND: usize = 1;
/// Before each packet, in the queues and in the tap alike.
pub(super) const HEADER_BYTES: usize = 12;
/// The longest packet with its header.
pub(super) const PACKET_BYTES: usize = 65_536 + HEADER_BYTES;
/// The status in the configuration space, after the address of 6 bytes.
pub(super) const STATUS_AT: usize = 6;
pub(super) const LINK_UP: u8 = 1;
pub(super) const ANNOUNCE: u8 = 2;
