//! One direction of a flow at its sender: the bytes that are not acknowledged, and the place in the stream.

use std::collections::VecDeque;
use std::time::Duration;

use super::carriers::CarrierId;
use super::outgoing_frame::PackingHint;
use super::piece::Piece;
use super::rate::Stamp;
use super::settings::FIRST_WINDOW;
use crate::frame::{PAGE_BYTES, ResetReason};

/// How long the begin of a page waits for its end, so that the page goes in one frame.
const HOLD: Duration = Duration::from_millis(2);

/// How a direction of a flow ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// In order.
    Finish,
    /// Because a connection broke.
    Reset(ResetReason),
}

/// Which bytes precede others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Return path, preempt channel, answers of servers.
    Urgent,
    /// Pages and disks.
    Bulk,
}

/// The sender's state of one direction.
#[derive(Debug)]
pub(super) struct Outgoing {
    pieces: VecDeque<Piece>,
    /// Bytes that the peer has received; offset of the first stored byte.
    acknowledged: u64,
    /// Bytes that the peer's VMM has taken.
    pub(super) delivered: u64,
    /// When `delivered` grew the last time, or the first byte was sent.
    pub(super) progress_at: Duration,
    /// Offset of the next byte to send.
    next: u64,
    /// Bytes that were ever sent.
    pub(super) sent: u64,
    /// Bytes that were taken from the VMM.
    pub(super) taken: u64,
    /// Offset up to which the peer permits to send.
    pub(super) credit: u64,
    pub(super) end: Option<End>,
    end_sent: bool,
    end_ever_sent: bool,
    pub(super) end_acknowledged: bool,
    /// The peer takes no more bytes.
    pub(super) is_stopped: bool,
    pub(super) carrier: Option<CarrierId>,
    pub(super) priority: Priority,
    stamps: VecDeque<(u64, Stamp)>,
    /// Offsets at which pages of guest memory begin.
    pages: VecDeque<u64>,
    /// When bytes were taken the last time.
    taken_at: Duration,
}

/// Bytes to send next.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) offset: u64,
    pub(super) bytes: Piece,
    /// How many of them are sent again.
    pub(super) again: u64,
    pub(super) packing: Option<PackingHint>,
}

impl Outgoing {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            pieces: VecDeque::new(),
            acknowledged: 0,
            delivered: 0,
            progress_at: now,
            next: 0,
            sent: 0,
            taken: 0,
            credit: FIRST_WINDOW,
            end: None,
            end_sent: false,
            end_ever_sent: false,
            end_acknowledged: false,
            is_stopped: false,
            carrier: None,
            priority: Priority::Bulk,
            stamps: VecDeque::new(),
            pages: VecDeque::new(),
            taken_at: now,
        }
    }

    /// Bytes that are stored: taken and not acknowledged.
    pub(super) fn stored(&self) -> u64 {
        self.taken - self.acknowledged
    }

    /// Bytes that were taken and that the peer's VMM has not taken.
    pub(super) fn in_flight(&self) -> u64 {
        self.taken - self.delivered.min(self.taken)
    }

    /// Whether the peer has everything, but its VMM does not read it.
    pub(super) fn waits_for_vmm(&self) -> bool {
        self.acknowledged > self.delivered
    }

    pub(super) fn take(&mut self, piece: Piece, stamp: Option<Stamp>, now: Duration) {
        self.taken_at = now;
        self.taken += piece.len() as u64;
        self.pieces.push_back(piece);
        if let Some(stamp) = stamp {
            self.stamps.push_back((self.taken, stamp));
        }
    }

    /// Pages begin at these offsets. Precedes the call of [`take`](Self::take) with their first bytes.
    pub(super) fn note_pages(&mut self, pages: &[u64]) {
        self.pages.extend(pages);
    }

    /// Whether the end may be stated: no end is stated yet.
    pub(super) fn set_end(&mut self, end: End) -> bool {
        let is_first = self.end.is_none();
        if is_first {
            self.end = Some(end);
        } else if !self.end_ever_sent && matches!(end, End::Reset(_)) {
            // A broken connection also breaks an orderly end that the peer has not seen.
            self.end = Some(end);
        }
        is_first
    }

    /// Whether there is something to send within the credit. `packs`: the begin of a page waits for its end.
    pub(super) fn has_work(&self, packs: bool, now: Duration) -> bool {
        let due = if packs { self.sendable_whole(now) } else { self.sendable() };
        due > 0 || self.has_end_to_send()
    }

    /// Whether bytes wait for the rest of their page.
    pub(super) fn holds(&self, now: Duration) -> bool {
        self.sendable_whole(now) < self.sendable()
    }

    /// As [`sendable`](Self::sendable), without the begin of a page whose end was not taken yet.
    fn sendable_whole(&self, now: Duration) -> u64 {
        let all = self.sendable();
        match self.pages.back() {
            Some(begin)
                if begin + PAGE_BYTES as u64 > self.taken
                    && *begin >= self.next
                    && self.end.is_none()
                    && now < self.taken_at + HOLD =>
            {
                all.min(begin - self.next)
            }
            _ => all,
        }
    }

    fn sendable(&self) -> u64 {
        self.taken.min(self.credit).saturating_sub(self.next)
    }

    pub(super) fn has_end_to_send(&self) -> bool {
        self.end.is_some() && !self.end_sent && self.next == self.taken
    }

    /// The next bytes as one frame that may be packed: whole pages, from several pieces. At most `most`.
    pub(super) fn next_whole(&mut self, most: usize, now: Duration) -> Option<Chunk> {
        let due = self.sendable_whole(now).min(most as u64);
        let mut ends = self.next + due;
        // The page that the end of the frame would cut goes into the next one.
        let first = self.pages.partition_point(|begin| *begin < self.next);
        let cut = self.pages.partition_point(|begin| *begin < ends);
        if cut > first && self.pages[cut - 1] + PAGE_BYTES as u64 > ends && self.pages[cut - 1] > self.next {
            ends = self.pages[cut - 1];
        }
        let pages = self.pages.range(first..cut).filter(|begin| **begin + PAGE_BYTES as u64 <= ends);
        let pages = pages.map(|begin| (begin - self.next) as usize).collect();
        let mut chunk = self.next_piece((ends - self.next) as usize)?;
        while self.next < ends {
            let Some(more) = self.next_piece((ends - self.next) as usize) else { break };
            let mut bytes = match chunk.bytes.into_owned() {
                Ok(bytes) => bytes,
                Err(piece) => piece.to_vec(),
            };
            bytes.reserve((ends - chunk.offset) as usize - bytes.len());
            bytes.extend_from_slice(&more.bytes);
            chunk.bytes = Piece::from(bytes);
            chunk.again += more.again;
        }
        chunk.packing = Some(PackingHint { pages, is_again: chunk.again > 0 });
        Some(chunk)
    }

    /// The next bytes of one piece, at most `most`.
    pub(super) fn next_piece(&mut self, most: usize) -> Option<Chunk> {
        let most = self.sendable().min(most as u64) as usize;
        if most == 0 {
            return None;
        }
        let mut skip = (self.next - self.acknowledged) as usize;
        // New bytes are at the end. Few pieces are stored, because the bytes in flight are limited.
        let piece = self.pieces.iter().find(|piece| {
            let is_here = skip < piece.len();
            skip -= if is_here { 0 } else { piece.len() };
            is_here
        })?;
        let piece = piece.part(skip, skip + most);
        let offset = self.next;
        self.next += piece.len() as u64;
        let again = self.sent.min(self.next) - self.sent.min(offset);
        self.sent = self.sent.max(self.next);
        Some(Chunk { offset, bytes: piece, again, packing: None })
    }

    pub(super) fn end_is_sent(&mut self) {
        (self.end_sent, self.end_ever_sent) = (true, true);
    }

    /// Whether frames may be on the way.
    pub(super) fn is_unacknowledged(&self) -> bool {
        self.acknowledged < self.next || (self.end_sent && !self.end_acknowledged)
    }

    /// Whether the end was ever sent.
    pub(super) fn has_stated_end(&self) -> bool {
        self.end_ever_sent
    }

    /// The carrier is lost: continues at the acknowledged offset.
    pub(super) fn rewind(&mut self, (skips_bytes, skips_end): (bool, bool)) {
        self.carrier = None;
        if !skips_bytes {
            self.next = self.acknowledged;
        }
        if !skips_end {
            self.end_sent = self.end_acknowledged;
        }
    }

    /// Sends the end again unless it is acknowledged.
    pub(super) fn repeat_end(&mut self) {
        self.end_sent = self.end_acknowledged;
    }

    /// The peer lacks a page: continues at its offset, if bytes after it were sent.
    pub(super) fn rewind_to(&mut self, offset: u64) {
        if offset >= self.acknowledged && offset <= self.next && !self.is_stopped {
            self.next = offset;
            self.end_sent = self.end_acknowledged;
        }
    }

    /// The peer has received so many bytes. Returns how many are no longer stored.
    pub(super) fn acknowledge(&mut self, received: u64) -> u64 {
        if received <= self.acknowledged {
            return 0;
        }
        let mut left = received - self.acknowledged;
        self.acknowledged = received;
        self.next = self.next.max(received);
        let over = self.pages.partition_point(|begin| *begin < received);
        self.pages.drain(..over);
        let freed = left;
        while left > 0 {
            let Some(first) = self.pieces.front_mut() else { break };
            if first.len() as u64 > left {
                *first = first.part(left as usize, first.len());
                break;
            }
            left -= first.len() as u64;
            self.pieces.pop_front();
        }
        freed
    }

    /// The peer's VMM has taken so many bytes. Returns the stamps of the groups of bytes that this completes.
    pub(super) fn note_delivered(&mut self, delivered: u64, now: Duration) -> Vec<Stamp> {
        if delivered <= self.delivered {
            return Vec::new();
        }
        (self.delivered, self.progress_at) = (delivered, now);
        let count = self.stamps.partition_point(|(end, _)| *end <= delivered);
        self.stamps.drain(..count).map(|(_, stamp)| stamp).collect()
    }

    /// The peer takes no more bytes. Returns how many are no longer stored.
    pub(super) fn stop(&mut self, reason: ResetReason) -> u64 {
        if std::mem::replace(&mut self.is_stopped, true) {
            return 0;
        }
        let freed = self.stored();
        self.pieces.clear();
        self.stamps.clear();
        self.pages.clear();
        // An end that the peer may have seen keeps its offset.
        if !self.end_ever_sent {
            self.end = Some(End::Reset(reason));
            self.taken = self.sent;
        }
        (self.next, self.acknowledged, self.delivered) = (self.taken, self.taken, self.taken);
        self.sent = self.taken;
        freed
    }
}
