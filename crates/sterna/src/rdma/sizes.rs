//! How much a connection holds, and how long its end may take.

use std::time::Duration;

use sterna_transport::rdma::EndpointSizes;
use sterna_wire::rdma::MESSAGE_BYTES;

/// Receives that either side ever has posted on one connection, the spare ones of the machines included.
pub(super) const RECEIVES: u32 = 4;
/// Messages that are on their way before the next waits for a buffer.
pub(super) const SENDS: u32 = 4;
/// Most bytes of stream in one message. A QEMU takes any number that fits (§5.1); more than this gains nothing.
pub(super) const FILE_BYTES: usize = 256 << 10;

/// How long the last bytes of a direction may take.
pub(super) const LAST_WORDS: Option<Duration> = Some(Duration::from_secs(10));

/// What a connection needs that carries messages and so many writes at once.
pub(super) fn sizes(writes: u32) -> EndpointSizes {
    EndpointSizes::messages(MESSAGE_BYTES as u32, RECEIVES, SENDS).with_writes(writes)
}
