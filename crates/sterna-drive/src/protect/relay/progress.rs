//! Tracks the progress of checkpoints from QEMU through this program to the standby.
//!
//! This side answers QEMU when the whole checkpoint has arrived. The last byte on the main channel must be here. Each
//! multifd channel must have one SYNC for each MULTIFD_FLUSH of the main channel.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// State of the present checkpoint.
#[derive(Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The seeding is over, and QEMU's messages are decoded.
    is_followed: bool,
    /// The unknown message after which QEMU's messages are not decoded any more.
    lost_because: Option<String>,
    /// Number of the last checkpoint that may be taken.
    number: u64,
    /// The checkpoint's last byte on the main channel has arrived.
    is_main_whole: bool,
    /// This side has answered the checkpoint before the standby did.
    is_answered: bool,
    /// Number of the last checkpoint that the standby has loaded.
    loaded: u64,
    /// Since the seeding: number of flushes on the main channel. `syncs`: number of SYNCs on each multifd channel.
    flushes: u64,
    syncs: Vec<u64>,
    /// Value of `flushes` at the begin of the checkpoint.
    flushes_before: u64,
    is_closed: bool,
}

/// The handling of the standby's RECEIVED.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// QEMU waits for it.
    HandOn,
    /// This side has answered already, so the message is dropped.
    Known,
    /// An error: the standby cannot have received the whole checkpoint.
    TooEarly,
}

impl Progress {
    /// Starts decoding: the next byte of QEMU on any channel follows CHECKPOINT_READY. `channels`: multifd channels.
    pub(super) fn follow(&self, channels: usize) {
        let mut state = self.state.lock();
        state.syncs = vec![0; channels];
        state.is_followed = true;
    }

    /// Whether the seeding is over and QEMU's messages are decoded.
    pub(super) fn is_followed(&self) -> bool {
        self.state.lock().is_followed
    }

    /// Stops decoding after an unknown message. From now on QEMU waits for the standby's own answers.
    pub(super) fn lose(&self, why: String) {
        self.state.lock().lost_because.get_or_insert(why);
    }

    /// The unknown message, if QEMU has sent one.
    pub(super) fn lost_because(&self) -> Option<String> {
        self.state.lock().lost_because.clone()
    }

    /// Checkpoint `number` may be taken.
    pub(super) fn replied(&self, number: u64) {
        let mut state = self.state.lock();
        (state.number, state.is_main_whole, state.is_answered) = (number, false, false);
        state.flushes_before = state.flushes;
    }

    /// Counts a flush: each multifd channel must bring one more SYNC.
    pub(super) fn flush(&self) {
        self.state.lock().flushes += 1;
    }

    /// The checkpoint is complete on the main channel. Returns its number if it must be answered now and `may` agrees.
    pub(super) fn main_whole(&self, may: impl FnOnce(u64) -> bool) -> Option<u64> {
        let mut state = self.state.lock();
        state.is_main_whole = true;
        state.answer(may)
    }

    /// Counts SYNCs on the channel with this index. Returns the same as [`main_whole`](Self::main_whole).
    pub(super) fn synced(&self, channel: usize, syncs: u64, may: impl FnOnce(u64) -> bool) -> Option<u64> {
        let mut state = self.state.lock();
        *state.syncs.get_mut(channel)? += syncs;
        state.answer(may)
    }

    /// The standby reports that it holds the checkpoint.
    pub(super) fn received(&self) -> Received {
        let state = self.state.lock();
        match (state.is_answered, state.is_main_whole) {
            (true, _) => Received::Known,
            (false, true) => Received::HandOn,
            (false, false) if !state.is_followed || state.lost_because.is_some() => Received::HandOn,
            (false, false) => Received::TooEarly,
        }
    }

    /// The standby has loaded the checkpoint. Returns whether this side has answered it before.
    pub(super) fn loaded(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        state.loaded = number;
        self.changed.notify_all();
        state.is_answered
    }

    /// Waits until the standby has loaded each checkpoint that may be taken. It accepts no REQUEST earlier. False if
    /// the relay is closed.
    pub(super) fn wait_until_loaded(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_closed && state.loaded < state.number {
            self.changed.wait(&mut state);
        }
        !state.is_closed
    }

    /// Waits until the standby has loaded the last checkpoint that this side has answered, at most `most`. It does not
    /// wait for a checkpoint that the standby itself must answer.
    pub(super) fn wait_for_answered(&self, most: Option<Duration>) {
        let until = most.map(|most| Instant::now() + most);
        let mut state = self.state.lock();
        while !state.is_closed && state.is_answered && state.loaded < state.number {
            match until {
                Some(until) if self.changed.wait_until(&mut state, until).timed_out() => return,
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Wakes all waiting threads. They do not wait any more.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

impl State {
    /// The number of the checkpoint if it is complete and not answered yet.
    fn answer(&mut self, may: impl FnOnce(u64) -> bool) -> Option<u64> {
        let flushes = self.flushes - self.flushes_before;
        let are_all_synced = match self.syncs.is_empty() {
            true => flushes == 0,
            // Without a flush it is unknown when the pages of the multifd channels have arrived.
            false => flushes > 0 && self.syncs.iter().all(|syncs| *syncs >= self.flushes),
        };
        let is_due = self.is_main_whole && !self.is_answered && are_all_synced && self.lost_because.is_none();
        (is_due && may(self.number)).then(|| {
            self.is_answered = true;
            self.number
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yes(_: u64) -> bool {
        true
    }

    #[test]
    fn checkpoint_is_whole_when_every_channel_has_brought_all_of_it() {
        let progress = Progress::default();
        progress.follow(2);
        for number in 1..4 {
            progress.replied(number);
            progress.flush();
            assert_eq!(progress.synced(0, 2, yes), None);
            progress.flush();
            assert_eq!(progress.received(), Received::TooEarly);
            assert_eq!(progress.synced(1, 1, yes), None);
            assert_eq!(progress.main_whole(yes), None, "a SYNC is missing");
            assert_eq!(progress.received(), Received::HandOn);
            assert_eq!(progress.synced(1, 1, yes), Some(number));
            assert_eq!(progress.received(), Received::Known);
            assert!(progress.loaded(number));
        }
    }

    #[test]
    fn main_channel_alone_says_when_a_checkpoint_is_whole_and_it_is_answered_once() {
        let progress = Progress::default();
        progress.follow(0);
        progress.replied(1);
        assert_eq!(progress.main_whole(yes), Some(1));
        assert_eq!(progress.main_whole(yes), None);
    }

    #[test]
    fn standby_answers_itself_what_is_the_last_one_is_not_understood_or_says_no_flush() {
        let progress = Progress::default();
        progress.follow(0);
        progress.replied(1);
        assert_eq!(progress.main_whole(|_| false), None);
        assert_eq!((progress.received(), progress.loaded(1)), (Received::HandOn, false));
        progress.lose("a byte".to_owned());
        progress.replied(2);
        assert_eq!(progress.received(), Received::HandOn);
        assert_eq!(progress.main_whole(yes), None);

        let without_flush = Progress::default();
        without_flush.follow(1);
        without_flush.replied(1);
        assert_eq!(without_flush.main_whole(yes), None);
        assert_eq!(without_flush.synced(0, 1, yes), None);
    }

    #[test]
    fn request_waits_until_the_checkpoint_before_is_loaded() {
        let progress = std::sync::Arc::new(Progress::default());
        progress.follow(0);
        assert!(progress.wait_until_loaded(), "before the first nothing is under way");
        progress.replied(1);
        progress.main_whole(yes);
        let other = std::sync::Arc::clone(&progress);
        let (says, hears) = std::sync::mpsc::channel();
        let waits = std::thread::spawn(move || says.send(other.wait_until_loaded()).unwrap());
        assert!(hears.recv_timeout(Duration::from_millis(100)).is_err());
        progress.loaded(1);
        assert!(hears.recv_timeout(Duration::from_secs(60)).unwrap());
        waits.join().unwrap();
        progress.replied(2);
        progress.close();
        assert!(!progress.wait_until_loaded());
    }
}
