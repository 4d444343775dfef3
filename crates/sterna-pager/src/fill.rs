//! Fills the guests' memory in the background: the recorded working set first, then the neighbours of faults, then the rest.
//!
//! A frame of the working set or of the rest is read once and placed into every guest that lacks it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::answer::Service;
use crate::guest::{Guest, PIECE_BYTES};
use crate::options::FillRate;
use crate::pace::{Pace, Processors};

/// Most frames near faults that are remembered for one guest; the oldest are forgotten.
const MOST_NEIGHBOURS: usize = 256;
/// Interval between two looks whether faults still wait.
const WHILE_FAULTS: Duration = Duration::from_micros(50);
/// Pause after the image could not be read.
const AFTER_ERROR: Duration = Duration::from_secs(1);
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
}

/// A guest that lacks pages.
struct Waiting {
    guest: Arc<Guest>,
    /// Index of the next frame of the working set.
    recorded: usize,
    neighbours: VecDeque<Range<u64>>,
}

/// A part of the memory that is filled next, and the guests that lack it.
struct Job {
    offset: u64,
    guests: Vec<Arc<Guest>>,
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

    /// Ends the thread in [`work`].
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Sleeps for `time`. Returns `false` if the fill is closed.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closed && !self.changed.wait_until(&mut state, until).timed_out() {}
        !state.is_closed
    }

    /// The next job; waits until a guest lacks pages. `None` if the fill is closed.
    fn next(&self, service: &Service) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            state.guests.retain(|waiting| !waiting.guest.is_over());
            let job = state
                .recorded(service, &self.working_set)
                .or_else(|| state.neighbour())
                .or_else(|| state.rest(service));
            if job.is_some() {
                return job;
            }
            self.changed.wait_for(&mut state, IDLE);
        }
    }
}

impl State {
    /// The next frame of the working set that a guest lacks.
    fn recorded(&mut self, service: &Service, frames: &[u64]) -> Option<Job> {
        for at in 0..self.guests.len() {
            let index = (self.turn + at) % self.guests.len();
            let waiting = &mut self.guests[index];
            while let Some(offset) = frames.get(waiting.recorded).copied() {
                waiting.recorded += 1;
                if waiting.guest.lacks(&service.content.span(offset, waiting.guest.page_bytes())) {
                    self.turn = index + 1;
                    return Some(self.job_of_all(service, offset));
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
    fn rest(&mut self, service: &Service) -> Option<Job> {
        let next = |from: u64| self.guests.iter().filter_map(|it| it.guest.next_missing(from)).min();
        let offset = next(self.sweep).or_else(|| next(0))?;
        let job = self.job_of_all(service, offset);
        self.sweep = service.content.span(offset, 0).end;
        Some(job)
    }

    fn job_of_all(&self, service: &Service, offset: u64) -> Job {
        let lacks = |guest: &Arc<Guest>| guest.lacks(&service.content.span(offset, guest.page_bytes()));
        let guests = self.guests.iter().map(|waiting| &waiting.guest).filter(|guest| lacks(guest));
        Job { offset, guests: guests.cloned().collect() }
    }
}

/// The body of the thread that fills memory, until the order is closed.
pub(crate) fn work(service: &Service, rate: FillRate, buffer_bytes: usize) {
    let mut fill =
        Fill { service, pace: Pace::new(rate), processors: Processors::new(), spare: vec![0; buffer_bytes] };
    let mut content = vec![0; buffer_bytes];
    while let Some(Job { offset, guests }) = service.order.next(service) {
        // Guests with the same page size need the same bytes.
        let mut filled: Option<Range<u64>> = None;
        for guest in guests {
            let span = service.content.span(offset, guest.page_bytes());
            let bytes = (span.end - span.start) as usize;
            let content = &mut content[..bytes];
            if filled.as_ref() != Some(&span) && !service.content.source.is_zero(span.start, bytes as u64) {
                let began = Instant::now();
                if let Err(why) = service.content.read(span.start, content) {
                    // The guest may never touch the page. If it does, the page is read again, and a second error ends
                    // the guest.
                    tracing::warn!("the background fill left out {:#x}: {why}", span.start);
                    if !service.order.sleep(AFTER_ERROR) {
                        return;
                    }
                    break;
                }
                filled = Some(span.clone());
                if !fill.pause(began.elapsed(), 0) {
                    return;
                }
            }
            let content = (filled.as_ref() == Some(&span)).then_some(&*content);
            if !fill.place(&guest, &span, content) {
                return;
            }
        }
    }
}

struct Fill<'a> {
    service: &'a Service,
    pace: Pace,
    processors: Processors,
    /// For faults that this thread must answer itself.
    spare: Vec<u8>,
}

impl Fill<'_> {
    /// Places a span piece by piece. `content`: `None` for zeros. Returns `false` if the fill is closed.
    fn place(&mut self, guest: &Arc<Guest>, span: &Range<u64>, content: Option<&[u8]>) -> bool {
        let piece = PIECE_BYTES.max(guest.page_bytes() as usize);
        let mut at = span.start;
        while at < span.end && !guest.is_over() {
            while !self.service.load.is_idle() {
                if !self.service.order.sleep(WHILE_FAULTS) {
                    return false;
                }
            }
            let began = Instant::now();
            let bytes = (span.end - at).min(piece as u64);
            let put = match content {
                Some(content) => {
                    let from = (at - span.start) as usize;
                    let part = &content[from..from + bytes as usize];
                    self.service.put_run(guest, at, part, &mut self.spare)
                }
                None => self.service.put_zeros(guest, at, bytes, &mut self.spare),
            };
            if let Err(why) = put {
                self.service.give_up(guest, why);
            }
            at += bytes;
            if !self.pause(began.elapsed(), bytes) {
                return false;
            }
        }
        self.service.check_complete(guest);
        true
    }

    /// Pauses after work. Returns `false` if the fill is closed.
    fn pause(&mut self, worked: Duration, bytes: u64) -> bool {
        if let Some(idle) = self.processors.look() {
            self.pace.looked(idle);
        }
        let pause = self.pace.pause(worked, bytes);
        if pause.is_zero() {
            return true;
        }
        let began = Instant::now();
        let is_open = self.service.order.sleep(pause);
        self.pace.paused(began.elapsed());
        is_open
    }
}
