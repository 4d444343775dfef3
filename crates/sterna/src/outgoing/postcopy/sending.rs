//! Sends the pages that follow the guest.

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::source::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_wire::main::encode_end;

use super::enabled::Enabled;
use super::recovering::has_recovered;
use super::sender::PageSender;
use super::shared::Background;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::transfer::Transfer;
use crate::threads::ThreadRole;

/// The longest wait of the background before it checks for other work.
const PATIENCE: Duration = Duration::from_millis(20);

impl Enabled {
    pub(super) fn send_all(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), transfer.main()?);
        if !has_recovered(&shared) {
            transfer.note_start();
        }
        {
            let mut statistics = shared.measures.statistics.lock();
            let now = shared.measures.counters.now();
            statistics.at_start.get_or_insert(now);
            statistics.begin_postcopy();
            statistics.following_bytes = shared.postcopy.left_bytes();
            (statistics.round, statistics.next_round_bytes) = (None, 0);
        }
        let Some(sender) = self.page_sender.clone() else {
            return Err(
                MigrationError::Internal("pages must follow, but no lane sends them".to_owned()).into()
            );
        };
        let has_lanes = shared.postcopy.has_lanes() && !transfer.carrier()?.multifd().is_empty();
        if has_lanes {
            self.await_lanes(transfer)?;
        } else {
            self.send_background(transfer, &sender)?;
        }
        shared.postcopy.ends();
        shared.measures.statistics.lock().has_sent_all();
        shared.report(Fed::PagesSent);
        sender.close_preempt();
        main.with(|stream| {
            if has_lanes {
                stream.ram_part(false, true)?;
            }
            stream.ram_part(true, false)?;
            stream.send(|out| {
                encode_end(out);
                Ok(())
            })
        })?;
        transfer.carrier()?.say_goodbye();
        Ok(())
    }

    /// Starts the thread that sends requested pages.
    pub(super) fn answer_requests(
        &mut self,
        transfer: &mut Transfer,
        main: &Arc<MainChannel>,
    ) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let counters = Arc::clone(&shared.measures.counters);
        let sender = PageSender::new(shared.guest.ram.clone(), counters, main, self.preempt.clone());
        self.page_sender = Some(sender.clone());
        transfer.workers.spawn(ThreadRole::RequestedPages, move || {
            if let Err(error) = sender.answer(&shared.postcopy) {
                shared.fail(error);
            }
        })
    }

    /// Sends background pages over the main channel, until all pages are sent.
    ///
    /// It also waits until all requested pages are sent.
    fn send_background(&mut self, transfer: &mut Transfer, sender: &PageSender) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (limiter, main) = (&shared.postcopy.limiter, transfer.main()?);
        loop {
            transfer.waits.until(|| (!limiter.is_spent()).then_some(()))?;
            let next = shared.postcopy.next_background(PATIENCE, sender.is_alone(), || sender.is_full());
            match next {
                Background::Run(run) => {
                    limiter.take(run.count * PAGE_SIZE as u64);
                    let bytes = sender.send(run)?;
                    shared.postcopy.work.sent_background(run.count, bytes);
                    if let Some(channel) = &main.channel {
                        shared.postcopy.pace.keep(0, channel);
                    }
                    let counts = shared.measures.counters.now();
                    let mut statistics = shared.measures.statistics.lock();
                    statistics.following_bytes = shared.postcopy.left_bytes();
                    statistics.observe(counts);
                    drop(statistics);
                    transfer.waits.was_not_silent();
                }
                Background::Wait => transfer.waits.idle(),
                Background::Done => return Ok(()),
            }
        }
    }

    /// Waits until lanes have sent the background pages and all requested pages are sent.
    fn await_lanes(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (postcopy, lanes) = (&shared.postcopy, shared.session.lanes.count());
        postcopy.let_lanes_begin();
        let is_done = || (postcopy.lanes_are_through(lanes) && postcopy.ends_if_answered()).then_some(());
        while transfer.waits.at_most(PATIENCE, is_done)?.is_none() {
            let left = postcopy.left_bytes();
            let mut statistics = shared.measures.statistics.lock();
            statistics.following_bytes = left;
            statistics.observe(shared.measures.counters.now());
        }
        shared.measures.statistics.lock().following_bytes = 0;
        Ok(())
    }
}
