//! Sizes of a connection's buffers, and the time limit of its end.

use std::time::Duration;

use sterna_transport::rdma::EndpointSizes;
use sterna_wire::rdma::MESSAGE_BYTES;

/// Most receives that a side has posted on one connection, including the spare ones of the state machines.
pub(super) const RECEIVES: u32 = 4;
/// Most messages in flight before the next one waits for a buffer.
pub(super) const SENDS: u32 = 4;
/// Most bytes of the stream in one message. A QEMU accepts any size that fits (§5.1). A larger size has no
/// advantage.
pub(super) const FILE_BYTES: usize = 256 << 10;

/// How long the last bytes of a direction may take.
pub(super) const LAST_WORDS: Option<Duration> = Some(Duration::from_secs(10));

/// The sizes of a connection for messages and up to `writes` memory writes in flight.
pub(super) fn sizes(writes: u32) -> EndpointSizes {
    EndpointSizes::messages(MESSAGE_BYTES as u32, RECEIVES, SENDS).with_writes(writes)
}
