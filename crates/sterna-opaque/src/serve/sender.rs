//! Sends pages: all missing ones in the background, and requested ones with priority.

use std::sync::Arc;
use std::time::Duration;

use sterna::error::{Difference, MigrationError};
use sterna::internals::PageRun;
use sterna::internals::postcopy::Pace;
use sterna::internals::postcopy::{CHUNK_PAGES, PageOrder};
use sterna_ram::{Backing, RamBlock, RamSlice};
use sterna_transport::{Channel, TransportError};
use sterna_wire::PAGE_SIZE;

use super::cache::Key;
use super::records::{Encoded, encode};
use super::shared::{Shared, State};

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_SIZE;
/// Most requested pages in one write.
const REQUESTED_AT_ONCE: u64 = 16;
/// Bytes of background pages that may wait in the kernel before a requested page on the same channel.
const QUEUED_BYTES: u64 = 512 << 10;
/// Interval at which the sender checks whether fewer bytes wait.
const LOOK: Duration = Duration::from_micros(100);
/// Chunks that are read ahead.
const AHEAD: usize = 8;

/// The channels of one connection.
#[derive(Clone)]
pub(crate) struct Channels {
    pub(crate) main: Arc<Channel>,
    /// The channel for requested pages, if the destination has one.
    pub(crate) preempt: Option<Arc<Channel>>,
}

impl Channels {
    /// Writes to the main channel in one piece, so that writes of other threads do not mix with it.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let _turn = self.main.turn();
        Ok(self.main.write_all(bytes)?)
    }
}

/// Sends all pages that are not requested, until none is left.
pub(crate) fn send_background(shared: &Shared, channels: &Channels) -> Result<(), MigrationError> {
    let cache = shared.image.cache();
    let section = Some(shared.image.shape().ram.section_id);
    let depth = AHEAD.min(cache.slots() / 2);
    let mut out = Vec::with_capacity(CHUNK_BYTES + CHUNK_BYTES / 8);
    let pace = Pace::default();
    while let Some((run, ahead)) = next_background(shared, channels, depth)? {
        let held = |key: &Key| {
            let first = key.1 * CHUNK_PAGES;
            cache.store().held(key.0).next_run(first, first + CHUNK_PAGES, 1).is_some()
        };
        cache.read_ahead(ahead.into_iter().filter(held));
        let holds_any = cache.store().held(run.block).next_run(run.first, run.end(), 1).is_some();
        let encoded = if holds_any {
            let skipped = (run.first % CHUNK_PAGES) as usize * PAGE_SIZE;
            cache.with((run.block, run.first / CHUNK_PAGES), |chunk| {
                let content = chunk.part(skipped, run.count as usize * PAGE_SIZE);
                encode(&shared.image, section, run, content, &mut out)
            })?
        } else {
            encode(&shared.image, section, run, None, &mut out)?
        };
        channels.write(&out)?;
        if channels.preempt.is_some() {
            // Without a preempt channel, the background already waits for each request, and needs no pace.
            pace.keep(0, &channels.main);
        }
        shared.change(|state| count(state, encoded, out.len()));
    }
    Ok(())
}

/// Sends requested pages until the connection ends.
pub(crate) fn send_requested(shared: &Shared, channels: &Channels) {
    if let Err(error) = answer(shared, channels) {
        shared.fail(error);
    }
}

fn answer(shared: &Shared, channels: &Channels) -> Result<(), MigrationError> {
    let cache = shared.image.cache();
    let section = channels.preempt.is_none().then_some(shared.image.shape().ram.section_id);
    let channel = channels.preempt.as_ref().unwrap_or(&channels.main);
    let buffer = RamBlock::new("requested", REQUESTED_AT_ONCE * PAGE_SIZE as u64, Backing::Anonymous)?;
    let mut out = Vec::with_capacity(CHUNK_BYTES);
    let mut is_first = true;
    while let Some(run) = next_requested(shared) {
        let key = (run.block, run.first / CHUNK_PAGES);
        let bytes = run.count as usize * PAGE_SIZE;
        let is_in_chunk = (run.end() - 1) / CHUNK_PAGES == key.1;
        let mut from = |content: RamSlice<'_>| encode(&shared.image, section, run, Some(content), &mut out);
        let present = is_in_chunk.then(|| {
            let skipped = (run.first % CHUNK_PAGES) as usize * PAGE_SIZE;
            cache.with_present(key, |chunk| chunk.part(skipped, bytes).map(&mut from).transpose())
        });
        let encoded = match present.flatten().transpose()?.flatten() {
            Some(encoded) => encoded,
            // Reads only these pages, so that the request does not wait for its neighbours.
            None => {
                let content = buffer.slice(0, bytes)?;
                cache.store().read(run, content)?;
                from(content)?
            }
        };
        {
            let _turn = channel.turn();
            channel.write_all(&out).map_err(|error| not_taken(channels, is_first, error))?;
        }
        is_first = false;
        shared.change(|state| {
            state.connection.on_their_way -= 1;
            state.statistics.requested_pages += run.count;
            count(state, encoded, out.len());
        });
    }
    Ok(())
}

/// The error of requested pages that were not written. A preempt channel that the destination closes before it
/// has taken a page is not used there.
fn not_taken(channels: &Channels, is_first: bool, error: TransportError) -> MigrationError {
    if is_first && channels.preempt.is_some() && error.is_peer_gone() {
        return Difference::PreemptClosed { error: Arc::new(error) }.into();
    }
    error.into()
}

/// The next background pages, and the chunks that follow. `None`: all pages were taken.
fn next_background(
    shared: &Shared,
    channels: &Channels,
    depth: usize,
) -> Result<Option<(PageRun, Vec<Key>)>, MigrationError> {
    let mut state = shared.state.lock();
    loop {
        if let Some(error) = &state.connection.error {
            return Err(error.clone());
        }
        if channels.preempt.is_none() {
            // Requested pages use the same channel. They are sent first, and few bytes may wait before them in
            // the kernel.
            if state.order.has_requests() || state.connection.on_their_way > 0 {
                shared.changed.wait(&mut state);
                continue;
            }
            if channels.main.unsent_bytes() > QUEUED_BYTES {
                shared.changed.wait_for(&mut state, LOOK);
                continue;
            }
        }
        let run = state.order.take_background();
        return Ok(run.map(|run| (run, state.order.ahead(depth))));
    }
}

/// Waits for the next requested pages. `None`: the connection has ended.
fn next_requested(shared: &Shared) -> Option<PageRun> {
    let mut state = shared.state.lock();
    loop {
        if state.connection.error.is_some() || state.connection.is_over {
            return None;
        }
        let had_requests = state.order.has_requests();
        if let Some(run) = state.order.take_requested(REQUESTED_AT_ONCE) {
            state.connection.on_their_way += 1;
            return Some(run);
        }
        if had_requests {
            // The background has sent all requested pages. A thread that waits for the end of requests must
            // check again.
            shared.changed.notify_all();
        }
        shared.changed.wait(&mut state);
    }
}

fn count(state: &mut State, encoded: Encoded, bytes: usize) {
    state.statistics.content_pages += encoded.content_pages;
    state.statistics.zero_pages += encoded.zero_pages;
    state.statistics.written_bytes += bytes as u64;
    state.statistics.missing_pages =
        state.statistics.missing_pages.saturating_sub(encoded.content_pages + encoded.zero_pages);
}

/// Whether no page is left to be sent.
pub(crate) fn has_nothing_left(order: &mut PageOrder) -> bool {
    !order.has_requests() && order.ahead(1).is_empty()
}
