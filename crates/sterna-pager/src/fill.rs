//! Fills the guests' memory in the background.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::answer::{Service, unreadable};
use crate::fill_order::Job;
use crate::guest::{Guest, PIECE_BYTES};
use crate::options::FillRate;
use crate::pace::{Pace, Processors};

/// Interval between two looks whether faults still wait.
const WHILE_FAULTS: Duration = Duration::from_micros(50);
/// Pause after the image could not be read.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// The body of the thread that fills memory, until the order is closed.
pub(crate) fn work(service: &Service, rate: FillRate, buffer_bytes: usize) {
    let (pace, processors) = (Pace::new(rate), Processors::new(rate));
    let mut fill = Fill { service, pace, processors, spare: vec![0; buffer_bytes] };
    let mut content = vec![0; buffer_bytes];
    while let Some(Job { offset, guests }) = service.order.next(&service.content) {
        // Guests with the same page size need the same bytes.
        let mut filled: Option<Range<u64>> = None;
        for guest in guests {
            if guest.is_complete() {
                service.check_complete(&guest);
                continue;
            }
            let span = service.content.span(offset, guest.page_bytes());
            let bytes = (span.end - span.start) as usize;
            let content = &mut content[..bytes];
            if filled.as_ref() != Some(&span) && !service.content.source.is_zero(span.start, bytes as u64) {
                let began = Instant::now();
                if let Err(why) = service.content.read(span.start, content) {
                    // The guest may never touch the page. If it does, the page is read again, and a second error ends
                    // the guest.
                    tracing::warn!("the background fill left out {:#x}: {why}", span.start);
                    service.order.note_obstacle(unreadable(span.start, why));
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

    /// Pauses after work, unless an operation waits for all of the memory. Returns `false` if the fill is closed.
    fn pause(&mut self, worked: Duration, bytes: u64) -> bool {
        if self.service.order.is_hurried() {
            return true;
        }
        if let Some(idle) = self.processors.look() {
            self.pace.looked(idle);
        }
        let pause = self.pace.pause(worked, bytes);
        if pause.is_zero() {
            return true;
        }
        let began = Instant::now();
        let is_open = self.service.order.pause(pause);
        self.pace.paused(began.elapsed());
        is_open
    }
}
