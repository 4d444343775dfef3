//! Queue numbers and packet layout of a network card.

/// The first queue of a pair is for receiving, the second for sending. The control queue comes last.
pub(super) const RECEIVE: usize = 0;
pub(super) const SEND: usize = 1;
/// Length of the header before each packet, in the queues and in the tap.
pub(super) const HEADER_BYTES: usize = 12;
/// Longest packet including its header, in bytes.
pub(super) const PACKET_BYTES: usize = 65_536 + HEADER_BYTES;
/// Offset of the status in the configuration space, after the 6 bytes of the address.
pub(super) const STATUS_AT: usize = 6;
pub(super) const LINK_UP: u8 = 1;
pub(super) const ANNOUNCE: u8 = 2;
