//! The beginning of RAM, and rounds from their sync to their flush.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;

use super::{Transfer, no_rounds};
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::order::RoundPages;
use crate::precopy::SyncResult;

impl Transfer {
    /// Writes the sections before RAM, and RAM's START section.
    pub(in crate::outgoing) fn start_ram(&mut self) -> Result<(), MigrationError> {
        self.main()?.with(|stream| self.shared.guest.source.send_early(stream))?;
        self.carrier()?.begin_ram()
    }

    /// Tells the machine how many devices have to acknowledge the switchover.
    pub(in crate::outgoing) fn count_acknowledgements(&self) {
        for _ in 0..self.course.acknowledging_devices() {
            self.shared.report(Fed::DeviceAsksAck);
        }
    }

    /// Syncs, and ends hints.
    ///
    /// If a page were hinted later, this sync may have reported its write. That report is dropped because the
    /// round would read the page.
    pub(in crate::outgoing) fn sync(&mut self) -> Result<SyncResult, MigrationError> {
        self.pacing.hints.stop();
        match &mut self.rounds {
            Some(rounds) => rounds.sync(self.streams.as_ref()),
            None => Err(no_rounds()),
        }
    }

    /// Publishes the next round.
    pub(in crate::outgoing) fn publish(&mut self, tries_network: bool) -> Result<(), MigrationError> {
        let rounds = self.rounds()?;
        rounds.publish(tries_network);
        let number = rounds.round().number();
        if let Some(streams) = &self.streams {
            streams.enter_round(number);
        }
        self.rounds()?.tell();
        Ok(())
    }

    /// Waits until every lane has finished `round`, and writes its flush.
    pub(in crate::outgoing) fn run_dry(&mut self, round: &RoundPages) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let number = round.number();
        self.waits.until(|| shared.session.lanes.are_through(number).then_some(()))?;
        let is_last = self.rounds()?.is_last();
        self.carrier()?.end_round(is_last)?;
        shared.session.lanes.queue.flushed(number);
        self.rounds()?.close(round);
        Ok(())
    }
}
