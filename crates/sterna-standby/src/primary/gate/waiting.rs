//! The pieces that wait in a gate, in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::device_stream::AskCheckpoint;

use super::epoch_gate::{GateStatistics, MaySay};
use crate::last_times::LastTimes;

/// Interval at which waiting pieces are checked again, if no event wakes the thread earlier.
pub(super) const LOOK: Duration = Duration::from_millis(50);

pub(super) struct Waiting {
    /// `None`: the gate is open.
    may_say: Option<Arc<dyn Fn(u64) -> bool + Send + Sync>>,
    /// Epoch of new output.
    epoch: u64,
    released_epoch: u64,
    pieces: VecDeque<Piece>,
    limit_bytes: u64,
    ask: Option<AskCheckpoint>,
    /// Whether a checkpoint was requested in this epoch.
    has_asked: bool,
    counts: GateStatistics,
    /// Waiting times of the pieces that have left since the gate was closed.
    delays: LastTimes,
}

/// Bytes that leave together.
pub(super) struct Piece {
    /// 0: the piece was added while the gate was open.
    epoch: u64,
    /// Lane through which the piece leaves.
    pub(super) lane: usize,
    pub(super) bytes: Vec<u8>,
    pub(super) came: Instant,
}

impl Waiting {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self {
            may_say: None,
            epoch: 0,
            released_epoch: 0,
            pieces: VecDeque::new(),
            limit_bytes,
            ask: None,
            has_asked: false,
            counts: GateStatistics::default(),
            delays: LastTimes::default(),
        }
    }

    pub(super) fn close(&mut self, may_say: MaySay) {
        self.may_say = Some(may_say.into());
        (self.epoch, self.released_epoch, self.has_asked) = (1, 0, false);
        self.delays.clear();
    }

    pub(super) fn end_epoch(&mut self, epoch: u64) {
        (self.epoch, self.has_asked) = (epoch + 1, false);
    }

    pub(super) fn release(&mut self, epoch: u64) {
        self.released_epoch = self.released_epoch.max(epoch);
    }

    pub(super) fn open(&mut self) {
        (self.may_say, self.ask) = (None, None);
    }

    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        self.ask = None;
        (self.counts.waiting, self.counts.waiting_bytes) = (0, 0);
    }

    pub(super) fn ask_when_full(&mut self, ask: AskCheckpoint) {
        self.ask = Some(ask);
    }

    pub(super) fn is_open(&self) -> bool {
        self.may_say.is_none()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether the first waiting piece is released.
    pub(super) fn has_released(&self) -> bool {
        self.pieces.front().is_some_and(|piece| self.is_open() || piece.epoch <= self.released_epoch)
    }

    pub(super) fn has_room(&self) -> bool {
        self.counts.waiting_bytes < self.limit_bytes
    }

    /// Returns the function that requests a checkpoint. `None` if there is room, or a request was already made in
    /// this epoch.
    pub(super) fn ask(&mut self) -> Option<AskCheckpoint> {
        if self.has_room() || self.has_asked {
            return None;
        }
        let ask = self.ask.clone()?;
        self.has_asked = true;
        Some(ask)
    }

    /// Adds output of the guest. It joins the last piece if that has fewer than `most` bytes, and the same lane and
    /// epoch.
    pub(super) fn push(&mut self, lane: usize, bytes: &[u8], most: usize) {
        let epoch = if self.may_say.is_some() { self.epoch } else { 0 };
        self.counts.waiting_bytes += bytes.len() as u64;
        match self.pieces.back_mut() {
            Some(last) if last.epoch == epoch && last.lane == lane && last.bytes.len() < most => {
                last.bytes.extend_from_slice(bytes);
            }
            _ => {
                self.counts.waiting += 1;
                self.pieces.push_back(Piece { epoch, lane, bytes: bytes.to_vec(), came: Instant::now() });
            }
        }
    }

    /// Takes the first piece, if it may leave now.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        let first = self.pieces.front()?.epoch;
        let may = match &self.may_say {
            None => true,
            Some(_) if first == 0 => true,
            Some(may_say) => first <= self.released_epoch && may_say(first),
        };
        let piece = if may { self.pieces.pop_front() } else { None }?;
        self.counts.waiting -= 1;
        self.counts.waiting_bytes -= piece.bytes.len() as u64;
        self.counts.released += 1;
        Some(piece)
    }

    /// Records the waiting time of a piece that has left.
    pub(super) fn has_left(&mut self, came: Instant) {
        let delay = came.elapsed();
        self.counts.last_delay = delay;
        self.delays.note(delay);
    }

    pub(super) fn statistics(&self) -> GateStatistics {
        let [delay_p50, delay_p99] = self.delays.at_most([500, 990]);
        GateStatistics { delay_p50, delay_p99, ..self.counts }
    }

    /// When the oldest waiting piece of the current epoch was added.
    pub(super) fn since(&self) -> Option<Instant> {
        let first = self.pieces.partition_point(|piece| piece.epoch < self.epoch);
        self.pieces.get(first).filter(|_| self.may_say.is_some()).map(|piece| piece.came)
    }

    pub(super) fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| piece.bytes.as_slice())
    }
}
