//! Fills memory before the VMM asks for it.
//!
//! The VMM walks all of its memory in ascending order, one page at a time, between the guest's faults. The frames after the
//! walk's last request are therefore needed next: they are filled without a pause. The rest has the speed of the setting. A
//! request elsewhere is a fault of the guest; the neighbours of its page are in the frame that was placed for it.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::placement::Placement;
use crate::options::FillRate;
use crate::pace::{Pace, Processors};

/// Bytes of memory after a request of the walk that are filled without a pause.
const NEAR_BYTES: u64 = 4 << 20;

/// Which frames are filled next.
pub(super) struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
    /// Frames in [`NEAR_BYTES`].
    near: u64,
}

#[derive(Default)]
struct State {
    /// The frame after the one of the walk's last request.
    next: u64,
    /// The first frame that is not near the walk.
    until: u64,
    /// The frame after the one of the last request that was not the walk's. A request there begins a new walk.
    other: Option<u64>,
    /// The frame at which the search for the rest continues.
    rest: u64,
    is_closed: bool,
}

/// The next step of a thread that fills memory.
enum Job {
    /// Fill a frame. `is_near`: without a pause.
    Fill {
        frame: u64,
        is_near: bool,
    },
    End,
}

impl Ahead {
    pub(super) fn new(placement: &Placement) -> Self {
        let frame_bytes = placement.machine.content.source.frame_bytes();
        Self { state: Mutex::default(), changed: Condvar::new(), near: NEAR_BYTES.div_ceil(frame_bytes) }
    }

    /// Notes that the VMM has asked for a page of `frame`.
    pub(super) fn requested(&self, frame: u64) {
        let mut state = self.state.lock();
        if state.next == frame + 1 {
            return;
        }
        if state.next != frame && state.other != Some(frame) {
            state.other = Some(frame + 1);
            return;
        }
        state.next = frame + 1;
        state.until = frame + 1 + self.near;
        state.rest = state.rest.max(state.until);
        self.changed.notify_all();
    }

    /// Ends all threads that fill memory, after their current frame.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// The body of a thread that fills memory. `rate`: `None` fills only what is near.
    pub(super) fn work(&self, placement: &Placement, rate: Option<FillRate>) {
        let mut buffer = placement.buffer();
        let mut pace = rate.map(Pace::new);
        let mut processors = Processors::new(rate.unwrap_or(FillRate::Off));
        // When the pause began, and when it ends.
        let mut pause: Option<(Instant, Instant)> = None;
        loop {
            match self.next(placement, pace.is_some(), pause.map(|(_, end)| end)) {
                Job::End => return,
                Job::Fill { frame, is_near } => {
                    if let (Some(pace), Some((began, _)), false) = (&mut pace, pause, is_near) {
                        pace.paused(began.elapsed());
                        pause = None;
                    }
                    let began = Instant::now();
                    if let Err(why) = placement.fill(frame, &mut buffer) {
                        // If the VMM asks for a page of it, the frame is read again, and a second error ends the session.
                        tracing::warn!("the fill left out frame {frame} of the memory: {why}");
                    }
                    if let (Some(pace), false) = (&mut pace, is_near) {
                        if let Some(idle) = processors.look() {
                            pace.looked(idle);
                        }
                        let time = pace.pause(began.elapsed(), buffer.len() as u64);
                        let now = Instant::now();
                        pause = (!time.is_zero()).then(|| (now, now + time));
                    }
                }
            }
        }
    }

    /// The next job; waits for it.
    fn next(&self, placement: &Placement, fills_rest: bool, paused_until: Option<Instant>) -> Job {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return Job::End;
            }
            if let Some(frame) = placement.next_missing(state.next..state.until) {
                return Job::Fill { frame, is_near: true };
            }
            let paused_until = paused_until.filter(|until| fills_rest && *until > Instant::now());
            if let Some(until) = paused_until {
                self.changed.wait_until(&mut state, until);
                continue;
            }
            if fills_rest
                && placement.missing_pages() > 0
                && let Some(frame) = state.rest(placement)
            {
                return Job::Fill { frame, is_near: false };
            }
            self.changed.wait(&mut state);
        }
    }
}

impl State {
    /// The next frame of the rest.
    fn rest(&mut self, placement: &Placement) -> Option<u64> {
        let found = placement.next_missing(self.rest..placement.frames());
        let found = found.or_else(|| placement.next_missing(0..self.rest));
        self.rest = found.map_or(self.rest, |frame| frame + 1);
        found
    }
}
