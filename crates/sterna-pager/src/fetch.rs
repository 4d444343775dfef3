//! Reads the frames that faults wait for.

use std::sync::Arc;

use crate::answer::Service;
use crate::error::GuestError;
use crate::fetches::Waiter;
use crate::guest::{Guest, PIECE_BYTES};

/// The body of a thread that reads frames for faults, until the queue is closed.
pub(crate) fn work(service: &Service, buffer_bytes: usize) {
    let (mut content, mut spare) = (vec![0; buffer_bytes], vec![0; buffer_bytes]);
    while let Some(span) = service.fetches.next() {
        let content = &mut content[..(span.end - span.start) as usize];
        let read = service.content.read(span.start, content).map_err(Arc::new);
        let waiters = service.fetches.take(&span);
        let mut guests: Vec<Arc<Guest>> = Vec::new();
        for Waiter { guest, fault } in waiters {
            if let Some(fault) = fault {
                let offset = fault.page * guest.page_bytes();
                let read =
                    read.as_ref().map_err(|source| GuestError::Source { offset, source: Arc::clone(source) });
                let put = read.and_then(|()| {
                    let bytes = guest.page_bytes() as usize;
                    let from = (offset - span.start) as usize;
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
