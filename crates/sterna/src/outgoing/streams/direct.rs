//! A stopped device's save thread writes its chunks itself, on any channel that is free: the chunk is still in its
//! processor's cache, and nobody has to be woken. While the guest runs lanes write them, so that pages have their share.

use std::sync::{Arc, MutexGuard};

use sterna_transport::Channel;

use super::super::shared::Shared;
use crate::error::MigrationError;

/// Writes a chunk's packet of device `index`; waits for its turn.
pub(super) fn write(
    shared: &Shared,
    channels: &[Arc<Channel>],
    index: usize,
    packet: &[u8],
) -> Result<(), MigrationError> {
    let bytes = packet.len() as u64;
    let counters = &shared.counters;
    counters.throttled(shared.limiter.take(bytes));
    let (channel, _turn) = turn(channels, index)?;
    counters.moving(|| channel.write_all(packet))?;
    counters.multifd(bytes);
    counters.chunk(bytes);
    Ok(())
}

/// A channel on which nobody writes, from the device's own on; where somebody does on all of them, its own in turn.
fn turn(channels: &[Arc<Channel>], index: usize) -> Result<(&Channel, MutexGuard<'_, ()>), MigrationError> {
    let count = channels.len();
    let from_own = (0..count).map(|at| &channels[(index + at) % count]);
    let free = from_own.clone().find_map(|channel| Some((channel.as_ref(), channel.try_turn()?)));
    let own = || channels.get(index % count.max(1)).map(|channel| (channel.as_ref(), channel.turn()));
    free.or_else(own).ok_or_else(|| MigrationError::Internal("chunks of devices and no channel".to_owned()))
}
