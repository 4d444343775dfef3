//! Synchronises lanes and main channel (specs/stream.md §3.5).
//!
//! A lane that has read SYNC number k waits until the main channel has reached flush number k. The main channel
//! waits at flush k until every lane has read its k-th SYNC. Between two flushes a page may arrive only once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_ram::{DirtyBitmaps, GuestRam};
use sterna_transport::SilenceWatch;
use sterna_wire::extension::Holds;

use crate::error::{Awaited, BadPage, BadRound, Ending, MigrationError};
use crate::interruption::Break;
use crate::order::PageRun;
use crate::reconnect::HeldPages;

pub(super) struct Rounds {
    state: Mutex<FlushState>,
    changed: Condvar,
    /// Pages that arrived in this round. Set once RAM's blocks are known.
    seen: OnceLock<DirtyBitmaps>,
    /// Pages that are completely received. Set if the source reconnects after a loss.
    held: OnceLock<HeldPages>,
    /// True: pages that arrive twice are not detected.
    trusting: AtomicBool,
}

struct FlushState {
    /// Per lane: number of SYNCs that were read.
    syncs: Vec<u64>,
    /// Per lane: whether its channel has ended.
    ended: Vec<bool>,
    flushes: u64,
    /// Packets over all lanes.
    packets: u64,
    /// Number of RAM packets including SYNCs, and the highest packet number plus one.
    numbered: (u64, u64),
    /// Packets over all lanes up to the last flush.
    flushed_packets: u64,
    phase: Phase,
    stopped: bool,
}

/// The purpose of packets on lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Packets carry rounds of precopy.
    Precopy,
    /// No packets are allowed: in postcopy the source does not use lanes here.
    Silent,
    /// Packets carry pages while the guest runs, until the next flush.
    Following,
}

impl FlushState {
    fn new(lanes: usize) -> Self {
        Self {
            syncs: vec![0; lanes],
            ended: vec![false; lanes],
            flushes: 0,
            packets: 0,
            numbered: (0, 0),
            flushed_packets: 0,
            phase: Phase::Precopy,
            stopped: false,
        }
    }
}

impl Rounds {
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            state: Mutex::new(FlushState::new(lanes)),
            changed: Condvar::new(),
            seen: OnceLock::new(),
            held: OnceLock::new(),
            trusting: AtomicBool::new(false),
        }
    }

    /// Lets lanes begin, because RAM's blocks are known.
    pub(super) fn begin(&self, ram: &GuestRam) {
        // The first call counts. A second call changes nothing.
        let _ = self.seen.set(DirtyBitmaps::new(ram));
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Records from now on which pages are received, because the source reconnects after a loss.
    pub(super) fn note_held(&self, ram: &GuestRam) {
        self.held.get_or_init(|| HeldPages::new(ram));
    }

    /// Records that all bytes of these pages are in their places.
    pub(super) fn came(&self, run: PageRun) {
        if let Some(held) = self.held.get() {
            held.came(run.block, run.first, run.count);
        }
    }

    /// Ends a round on the main channel, if no lanes have to be synchronised.
    pub(super) fn round_ended(&self) {
        if let Some(held) = self.held.get() {
            held.round_ended();
        }
    }

    /// The received pages of the current session, or `None` if they are not recorded. Call it only while no
    /// thread receives.
    pub(super) fn held(&self) -> Option<Holds> {
        self.held.get().map(HeldPages::report)
    }

    /// Begins another session. Call it before any thread receives.
    pub(super) fn begin_session(&self, session: u32) {
        if let Some(held) = self.held.get() {
            held.begin_session(session);
        }
        if let Some(seen) = self.seen.get() {
            seen.clear_all();
        }
        let mut state = self.state.lock();
        *state = FlushState::new(state.syncs.len());
    }

    /// Waits until RAM's blocks are known.
    pub(super) fn wait_for_blocks(&self) -> Result<(), Break> {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return Err(Break::Interrupted);
            }
            if self.seen.get().is_some() {
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    /// Lets pages arrive twice from now on.
    ///
    /// A QEMU up to 8.0 repeats a page that fills a packet in the next packet. It sends both copies after it
    /// has cleared the page's dirty bit. If the copies differ, the page is sent again in a later round. In the
    /// last round they do not differ.
    pub(super) fn trust(&self) {
        self.trusting.store(true, Ordering::Relaxed);
    }

    /// A lane is about to receive `run`. A page that arrives twice in one round is a protocol error, because
    /// newer bytes would race older ones.
    pub(super) fn enter(&self, run: PageRun) -> Result<(), MigrationError> {
        let Some(seen) = self.seen.get() else {
            return Err(MigrationError::Internal("a page came before the block list".to_owned()));
        };
        let new = seen.block(run.block).set_range(run.first, run.count);
        if new == run.count || self.trusting.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(BadPage::TwiceInRound { block: run.block, first: run.first, last: run.end() - 1 }.into())
    }

    /// Counts a packet with this number. True: its pages arrive while the guest runs.
    pub(super) fn packet(&self, number: u64) -> Result<bool, MigrationError> {
        let mut state = self.state.lock();
        state.packets += 1;
        let (count, next) = state.numbered;
        state.numbered = (count + 1, next.max(number.saturating_add(1)));
        match state.phase {
            Phase::Precopy => Ok(false),
            Phase::Following => Ok(true),
            Phase::Silent => Err(BadRound::PacketInPostcopy { number }.into()),
        }
    }

    /// Ends precopy: no packet may be on its way on a lane, and none may follow.
    #[cfg(feature = "postcopy")]
    pub(super) fn end_precopy(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        if state.packets != state.flushed_packets && !self.trusting.load(Ordering::Relaxed) {
            let late = state.packets - state.flushed_packets;
            return Err(BadRound::PacketsBeforeListen { late }.into());
        }
        state.phase = Phase::Silent;
        Ok(())
    }

    /// Lets lanes carry pages while the guest runs.
    #[cfg(feature = "postcopy")]
    pub(super) fn follow(&self) {
        self.state.lock().phase = Phase::Following;
    }

    /// Whether lanes may carry pages while the guest runs.
    pub(super) fn is_following(&self) -> bool {
        self.state.lock().phase == Phase::Following
    }

    /// Whether all packets up to the highest number have arrived. The numbers count from 0, over all channels
    /// of the source.
    pub(super) fn numbers_are_complete(&self) -> bool {
        let (count, next) = self.state.lock().numbered;
        count == next
    }

    /// Counts a packet with a chunk of a device stream, which is not tied to a flush.
    pub(super) fn device_packet(&self) {
        let mut state = self.state.lock();
        state.packets += 1;
        state.flushed_packets += 1;
    }

    /// A lane has read SYNC: waits for the main channel's flush.
    pub(super) fn sync(&self, lane: usize) -> Result<(), Break> {
        let mut state = self.state.lock();
        state.syncs[lane] += 1;
        self.changed.notify_all();
        loop {
            if state.stopped {
                return Err(Break::Interrupted);
            }
            if state.flushes >= state.syncs[lane] {
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    /// A lane's channel ended between two packets. The next flush checks whether packets are missing. In
    /// postcopy this is an error immediately, because a guest may wait for a page until that flush.
    pub(super) fn ended(&self, lane: usize) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        state.ended[lane] = true;
        let owes_pages = state.phase == Phase::Following && state.syncs[lane] == state.flushes;
        drop(state);
        self.changed.notify_all();
        match owes_pages {
            true => Err(Ending::NoLastSync { channel: lane }.into()),
            false => Ok(()),
        }
    }

    /// The main channel has reached a flush: waits until all lanes have read their SYNC. Fails if no channel
    /// receives a byte for `stall`.
    pub(super) fn flush(&self, mut silence: SilenceWatch, stall: Duration) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        let due = state.flushes + 1;
        loop {
            if state.stopped {
                return Err(MigrationError::Cancelled);
            }
            let Some(late) = state.syncs.iter().position(|&syncs| syncs < due) else { break };
            if state.ended[late] {
                return Err(self.broken(BadRound::NoSync { channel: late, sync: due }.into()));
            }
            let waited = self.changed.wait_for(&mut state, stall / 2);
            if waited.timed_out() && silence.silent_for() >= stall {
                let what = Awaited::Sync { number: due, channel: late };
                return Err(self.broken(MigrationError::Limit { what, after: stall }));
            }
        }
        // Every lane waits at its SYNC, so no other thread uses the bits now.
        if let Some(seen) = self.seen.get() {
            seen.clear_all();
        }
        // The first flush of a session ends no round.
        if let Some(held) = self.held.get().filter(|_| due > 1) {
            held.round_ended();
        }
        state.flushes = due;
        if state.phase == Phase::Following {
            state.phase = Phase::Silent;
        }
        state.flushed_packets = state.packets;
        self.changed.notify_all();
        Ok(())
    }

    /// Treats the error of an ended or silent channel as a lost connection, if the source reconnects.
    fn broken(&self, error: MigrationError) -> MigrationError {
        match self.held.get() {
            Some(_) => Ending::Round(Arc::new(error)).into(),
            None => error,
        }
    }

    /// The stream has ended. No packet may follow the last flush, because its pages would not have been
    /// awaited.
    pub(super) fn complete(&self) -> Result<(), MigrationError> {
        let state = self.state.lock();
        if state.packets == state.flushed_packets || self.trusting.load(Ordering::Relaxed) {
            return Ok(());
        }
        let late = state.packets - state.flushed_packets;
        Err(BadRound::PacketsAfterFlush { late, flush: state.flushes }.into())
    }

    /// RAM has ended while the guest runs. No packet may follow, and a flush must have followed the last one.
    pub(super) fn end_following(&self) -> Result<(), MigrationError> {
        self.state.lock().phase = Phase::Silent;
        self.complete()
    }

    /// Another connection without lanes replaces a lost one, and all lanes have ended. Packets that were on
    /// their way are lost, and their pages arrive over other channels.
    #[cfg(feature = "postcopy")]
    pub(super) fn begin_recovery(&self) {
        let mut state = self.state.lock();
        state.phase = Phase::Silent;
        state.flushed_packets = state.packets;
        state.numbered = (0, 0);
    }

    /// Wakes all waiting threads, and ends every later wait.
    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Misbehaviour;

    #[test]
    fn after_a_recovery_packets_that_were_lost_are_not_missed_and_none_comes() {
        let rounds = Rounds::new(2);
        rounds.end_precopy().unwrap();
        rounds.follow();
        // Packet number 1 was on its way on the other lane.
        for number in [0, 2] {
            assert!(rounds.packet(number).unwrap());
        }
        assert!(rounds.complete().is_err() && !rounds.numbers_are_complete());
        rounds.stop();
        rounds.begin_recovery();
        assert!(!rounds.is_following() && rounds.numbers_are_complete());
        rounds.end_following().unwrap();
        let late = rounds.packet(3).unwrap_err();
        let MigrationError::PeerMisbehaved(Misbehaviour::Round(why)) = late else { panic!("{late}") };
        assert_eq!(why, BadRound::PacketInPostcopy { number: 3 });
    }
}
