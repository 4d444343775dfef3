//! Faults whose content must be waited for. Faults of the same frame wait together.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::answer::{Service, unreadable};
use crate::guest::{Fault, Guest, PIECE_BYTES};

/// The queue of frames that faults wait for.
#[derive(Default)]
pub(crate) struct Fetches {
    state: Mutex<State>,
    added: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Range<u64>>,
    waiting: HashMap<(u64, u64), Vec<Waiter>>,
    is_closed: bool,
}

struct Waiter {
    guest: Arc<Guest>,
    /// `None`: only the rest of the frame is placed.
    fault: Option<Fault>,
}

impl Fetches {
    /// Lets `fault` wait for the content of `span`, which is then placed whole.
    pub(crate) fn add(&self, span: Range<u64>, guest: &Arc<Guest>, fault: Option<Fault>) {
        let mut state = self.state.lock();
        let waiters = state.waiting.entry((span.start, span.end)).or_default();
        let is_new = waiters.is_empty();
        waiters.push(Waiter { guest: Arc::clone(guest), fault });
        if is_new {
            state.queue.push_back(span);
            self.added.notify_one();
        }
    }

    /// Ends all threads in [`work`].
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.added.notify_all();
    }

    fn next(&self) -> Option<Range<u64>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(span) = state.queue.pop_front() {
                return Some(span);
            }
            self.added.wait(&mut state);
        }
    }

    /// The faults that wait for `span`. A later fault of it is queued again.
    fn take(&self, span: &Range<u64>) -> Vec<Waiter> {
        self.state.lock().waiting.remove(&(span.start, span.end)).unwrap_or_default()
    }
}

/// The body of a thread that reads frames for faults, until the queue is closed.
pub(crate) fn work(service: &Service, buffer_bytes: usize) {
    let (mut content, mut spare) = (vec![0; buffer_bytes], vec![0; buffer_bytes]);
    while let Some(span) = service.fetches.next() {
        let content = &mut content[..(span.end - span.start) as usize];
        let read = service.content.read(span.start, content).map_err(unreadable);
        let waiters = service.fetches.take(&span);
        let mut guests: Vec<Arc<Guest>> = Vec::new();
        for Waiter { guest, fault } in waiters {
            if let Some(fault) = fault {
                let put = read.clone().and_then(|()| {
                    let bytes = guest.page_bytes() as usize;
                    let from = (fault.page * guest.page_bytes() - span.start) as usize;
                    service.put_fetched(&guest, fault.page, &content[from..from + bytes], &mut spare)
                });
                if let Err(why) = put {
                    service.give_up(&guest, why);
                }
            }
            if !guests.iter().any(|known| Arc::ptr_eq(known, &guest)) {
                guests.push(guest);
            }
        }
        // A frame that was read is placed whole, after all threads that wait for it continue.
        if read.is_ok() {
            guests.iter().for_each(|guest| place_whole(service, guest, span.start, content, &mut spare));
        }
    }
}

/// Places all missing pages of a span, in pieces, so that faults can be read in between.
fn place_whole(service: &Service, guest: &Arc<Guest>, start: u64, content: &[u8], spare: &mut [u8]) {
    let piece = PIECE_BYTES.max(guest.page_bytes() as usize);
    for (index, part) in content.chunks(piece).enumerate() {
        let placed = service.put_run(guest, start + (index * piece) as u64, part, spare);
        if let Err(why) = placed {
            service.give_up(guest, why);
        }
        if guest.is_over() {
            return;
        }
    }
    service.check_complete(guest);
}
