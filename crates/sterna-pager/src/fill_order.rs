//! Which memory is filled next: the recorded working set first, then the neighbours of faults, then the rest.
//!
//! A frame of the working set or of the rest is read once and placed into every guest that lacks it.
//!
//! An operation that needs all of a guest's memory *hurries* the fill: it has no pauses until the operation has ended, also if
//! it is off otherwise.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::content::Content;
use crate::error::GuestError;
use crate::guest::Guest;

/// Most frames near faults that are remembered for one guest; the oldest are forgotten.
const MOST_NEIGHBOURS: usize = 256;
/// Longest wait without a look at the guests.
const IDLE: Duration = Duration::from_millis(200);

/// Which pages are filled next.
pub(crate) struct FillOrder {
    state: Mutex<State>,
    changed: Condvar,
    /// Offsets of the frames of the working set, in their order.
    working_set: Vec<u64>,
    is_off: bool,
}

#[derive(Default)]
struct State {
    guests: Vec<Waiting>,
    /// The guest whose turn is next.
    turn: usize,
    /// Offset at which the search for the rest continues.
    sweep: u64,
    is_closed: bool,
    /// Operations that hurry the fill now.
    hurries: usize,
    /// Number of frames that the fill could not read, and the last reason.
    obstacles: u64,
    obstacle: Option<Arc<GuestError>>,
}

/// A guest that lacks pages.
struct Waiting {
    guest: Arc<Guest>,
    /// Index of the next frame of the working set.
    recorded: usize,
    neighbours: VecDeque<Range<u64>>,
}

/// A part of the memory that is filled next, and the guests that lack it. A guest of the list may lack nothing any more.
pub(crate) struct Job {
    pub(crate) offset: u64,
    pub(crate) guests: Vec<Arc<Guest>>,
}

impl FillOrder {
    pub(crate) fn new(working_set: Vec<u64>, is_off: bool) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), working_set, is_off }
    }

    /// Adds a guest.
    pub(crate) fn add(&self, guest: &Arc<Guest>) {
        let guest = Arc::clone(guest);
        self.state.lock().guests.push(Waiting { guest, recorded: 0, neighbours: VecDeque::new() });
        self.changed.notify_all();
    }

    /// Notes that the guest touched a page of `span`.
    pub(crate) fn note_fault(&self, guest: &Arc<Guest>, span: Range<u64>) {
        if self.is_off {
            return;
        }
        let mut state = self.state.lock();
        let known = state.guests.iter_mut().find(|known| Arc::ptr_eq(&known.guest, guest));
        let Some(known) = known.filter(|known| known.neighbours.back() != Some(&span)) else { return };
        if known.neighbours.len() == MOST_NEIGHBOURS {
            known.neighbours.pop_front();
        }
        known.neighbours.push_back(span);
    }

    /// Ends all waits.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Lets the fill work without pauses, and returns the number of obstacles so far. [`calm`](Self::calm) must follow.
    pub(crate) fn hurry(&self) -> u64 {
        let mut state = self.state.lock();
        state.hurries += 1;
        self.changed.notify_all();
        state.obstacles
    }

    /// Ends one [`hurry`](Self::hurry).
    pub(crate) fn calm(&self) {
        self.state.lock().hurries -= 1;
    }

    pub(crate) fn is_hurried(&self) -> bool {
        self.state.lock().hurries > 0
    }

    /// Lets the fill notice that a guest lacks nothing any more, although nothing was placed.
    pub(crate) fn look_again(&self) {
        // With the lock, so that the change cannot fall between a look and its wait.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Notes that the fill could not read a frame.
    pub(crate) fn note_obstacle(&self, why: GuestError) {
        let mut state = self.state.lock();
        state.obstacles += 1;
        state.obstacle = Some(Arc::new(why));
    }

    /// The last frame that could not be read after the first `seen` ones.
    pub(crate) fn obstacle_after(&self, seen: u64) -> Option<Arc<GuestError>> {
        let state = self.state.lock();
        state.obstacle.clone().filter(|_| state.obstacles > seen)
    }

    /// Sleeps for `time`, or until the fill is hurried or a guest lacks nothing any more. Returns `false` if the fill is closed.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closed
            && state.hurries == 0
            && state.complete().is_none()
            && !self.changed.wait_until(&mut state, until).timed_out()
        {}
        !state.is_closed
    }

    /// Sleeps for `time`. Returns `false` if the fill is closed.
    pub(crate) fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closed && !self.changed.wait_until(&mut state, until).timed_out() {}
        !state.is_closed
    }

    /// The next job; waits until a guest lacks pages. `None` if the fill is closed.
    pub(crate) fn next(&self, content: &Content) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            state.guests.retain(|waiting| !waiting.guest.is_over());
            let may_fill = !self.is_off || state.hurries > 0;
            let job = state.complete().or_else(|| match may_fill {
                true => state
                    .recorded(content, &self.working_set)
                    .or_else(|| state.neighbour())
                    .or_else(|| state.rest(content)),
                false => None,
            });
            if job.is_some() {
                return job;
            }
            self.changed.wait_for(&mut state, IDLE);
        }
    }
}

impl State {
    /// A guest that lacks nothing and does not know it: it has given its last missing pages back.
    fn complete(&self) -> Option<Job> {
        let waiting = self.guests.iter().find(|it| it.guest.is_complete() && !it.guest.is_over())?;
        Some(Job { offset: 0, guests: vec![Arc::clone(&waiting.guest)] })
    }

    /// The next frame of the working set that a guest lacks.
    fn recorded(&mut self, content: &Content, frames: &[u64]) -> Option<Job> {
        for at in 0..self.guests.len() {
            let index = (self.turn + at) % self.guests.len();
            let waiting = &mut self.guests[index];
            while let Some(offset) = frames.get(waiting.recorded).copied() {
                waiting.recorded += 1;
                if waiting.guest.lacks(&content.span(offset, waiting.guest.page_bytes())) {
                    self.turn = index + 1;
                    return Some(self.job_of_all(content, offset));
                }
            }
        }
        None
    }

    /// The frame of the last fault of the guest whose turn it is.
    fn neighbour(&mut self) -> Option<Job> {
        for at in 0..self.guests.len() {
            let index = (self.turn + at) % self.guests.len();
            let waiting = &mut self.guests[index];
            while let Some(span) = waiting.neighbours.pop_back() {
                if waiting.guest.lacks(&span) {
                    self.turn = index + 1;
                    let guests = vec![Arc::clone(&self.guests[index].guest)];
                    return Some(Job { offset: span.start, guests });
                }
            }
        }
        None
    }

    /// The next frame that any guest lacks, from where the search ended.
    fn rest(&mut self, content: &Content) -> Option<Job> {
        let next = |from: u64| self.guests.iter().filter_map(|it| it.guest.next_missing(from)).min();
        let offset = next(self.sweep).or_else(|| next(0))?;
        let job = self.job_of_all(content, offset);
        self.sweep = content.span(offset, 0).end;
        Some(job)
    }

    fn job_of_all(&self, content: &Content, offset: u64) -> Job {
        let lacks = |guest: &Arc<Guest>| guest.lacks(&content.span(offset, guest.page_bytes()));
        let guests = self.guests.iter().map(|waiting| &waiting.guest).filter(|guest| lacks(guest));
        Job { offset, guests: guests.cloned().collect() }
    }
}
