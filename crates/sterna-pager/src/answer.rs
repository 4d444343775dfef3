//! Answers the faults of all guests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::content::{Content, Now};
use crate::error::GuestError;
use crate::fetches::Fetches;
use crate::fill_order::FillOrder;
use crate::guest::{Fault, Guest, Put};
use crate::load::FaultLoad;
use crate::owner::Owner;
use crate::source::SourceError;
use crate::statistics::GuestEnd;
use crate::working_set::Recorder;

/// Attempts to place a page at once, before a thread sleeps between two attempts.
const EAGER: u32 = 16;

/// What all threads of a pager share.
pub(crate) struct Service {
    pub(crate) content: Content,
    pub(crate) fetches: Fetches,
    pub(crate) order: Arc<FillOrder>,
    pub(crate) load: FaultLoad,
    pub(crate) recorder: Option<Recorder>,
}

impl Service {
    /// Reads the guest's events and answers all faults. `buffer` has room for the largest page.
    ///
    /// A guest that cannot be served any more is ended here.
    pub(crate) fn serve(&self, guest: &Arc<Guest>, buffer: &mut [u8]) {
        if guest.is_over() {
            // A thread of the VMM may have announced a removal just before the memory was released. It waits until the event
            // is read.
            guest.discard_events();
            return;
        }
        if let Err(why) = self.try_serve(guest, buffer) {
            self.give_up(guest, why);
        }
    }

    fn try_serve(&self, guest: &Arc<Guest>, buffer: &mut [u8]) -> Result<(), GuestError> {
        let mut faults: VecDeque<Fault> = guest.read_events(|| self.load.one())?.into();
        while let Some(fault) = faults.pop_front() {
            self.record(guest, fault.page);
            let answered = self.answer(guest, fault, buffer, |guest| {
                faults.extend(guest.read_events(|| self.load.one())?);
                Ok(())
            })?;
            if answered == Put::Gone {
                return Ok(());
            }
        }
        self.check_complete(guest);
        Ok(())
    }

    /// Answers one fault, or queues it if its content must be waited for.
    fn answer(
        &self,
        guest: &Arc<Guest>,
        fault: Fault,
        buffer: &mut [u8],
        events: impl FnMut(&Guest) -> Result<(), GuestError>,
    ) -> Result<Put, GuestError> {
        let (page, bytes) = (fault.page, guest.page_bytes());
        let offset = page * bytes;
        if guest.is_removed(page) || self.content.source.is_zero(offset, bytes) {
            return patiently(guest, || guest.put_page(page, None), events);
        }
        let buffer = &mut buffer[..bytes as usize];
        let now = self.content.read_now(offset, buffer).map_err(|error| unreadable(offset, error))?;
        let span = self.content.span(offset, bytes);
        if now == Now::Later {
            self.fetches.add(span, guest, Some(fault));
            return Ok(Put::Done);
        }
        let put = patiently(guest, || guest.put_page(page, Some(buffer)), events);
        if now == Now::Frame && guest.lacks(&span) {
            self.fetches.add(span, guest, None);
        } else {
            self.order.note_fault(guest, span);
        }
        put
    }

    /// Places the page of a queued fault, whose content has arrived.
    pub(crate) fn put_fetched(
        &self,
        guest: &Arc<Guest>,
        page: u64,
        content: &[u8],
        spare: &mut [u8],
    ) -> Result<Put, GuestError> {
        patiently(guest, || guest.put_page(page, Some(content)), |_| self.try_serve(guest, spare))
    }

    /// Places a run of pages in the background.
    pub(crate) fn put_run(
        &self,
        guest: &Arc<Guest>,
        offset: u64,
        content: &[u8],
        spare: &mut [u8],
    ) -> Result<Put, GuestError> {
        patiently(guest, || guest.put_run(offset, content), |_| self.try_serve(guest, spare))
    }

    /// Places zeros in the background.
    pub(crate) fn put_zeros(
        &self,
        guest: &Arc<Guest>,
        offset: u64,
        bytes: u64,
        spare: &mut [u8],
    ) -> Result<Put, GuestError> {
        patiently(guest, || guest.put_zeros(offset, bytes), |_| self.try_serve(guest, spare))
    }

    /// Releases a guest whose memory is complete.
    pub(crate) fn check_complete(&self, guest: &Guest) {
        if guest.is_complete() && guest.finish(|_| GuestEnd::Completed) {
            guest.release();
            tracing::info!("{}: all of its memory is there", guest.name());
            if let Owner::Own(events) = &guest.owner {
                events.completed();
            }
        }
    }

    /// Kills the guest's VMM, which would wait for its pages without end. A guest of this process is stopped.
    pub(crate) fn give_up(&self, guest: &Guest, why: GuestError) {
        guest.finish(|owner| {
            let killed = owner.end(&why);
            match &killed {
                Ok(()) if guest.is_own() => tracing::error!("{}: {why}", guest.name()),
                Ok(()) => tracing::error!("{}: killed: {why}", guest.name()),
                Err(refusal) => tracing::error!(
                    "{}: {why}; its VMM hangs now and must be killed by the operator, because this process cannot kill \
                     it: {refusal}",
                    guest.name()
                ),
            }
            GuestEnd::GivenUp { is_killed: killed.is_ok(), why }
        });
    }

    fn record(&self, guest: &Guest, page: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.note(page * guest.page_bytes(), guest.page_bytes());
        }
    }
}

pub(crate) fn unreadable(offset: u64, error: SourceError) -> GuestError {
    GuestError::Source { offset, source: Arc::new(error) }
}

/// Calls `put` until the guest's memory does not change meanwhile. `events` reads the events that change it.
fn patiently(
    guest: &Guest,
    mut put: impl FnMut() -> Result<Put, GuestError>,
    mut events: impl FnMut(&Guest) -> Result<(), GuestError>,
) -> Result<Put, GuestError> {
    let mut attempts = 0;
    loop {
        let done = put()?;
        if done != Put::Again || guest.is_over() {
            return Ok(done);
        }
        events(guest)?;
        // The event may have been read by another thread. The kernel then still refuses until the VMM's thread, which sent the
        // event, has run.
        attempts += 1;
        if attempts < EAGER { thread::yield_now() } else { thread::sleep(Duration::from_micros(50)) }
    }
}
