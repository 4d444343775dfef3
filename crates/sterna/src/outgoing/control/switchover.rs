//! The switchover, with the guest stopped: the last pages, the devices, and the commit.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;

use super::Control;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::interruption::Break;
use crate::outgoing::transfer::not_open;
use crate::threads::call;

impl Control {
    /// Performs `SendFinalState`: the last sync, the last round, END of RAM, and every device.
    pub(super) fn send_final_state(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.transfer.main()?);
        // `max-bandwidth` protects other traffic from long precopy. The downtime should be short, so the limit is
        // lifted.
        shared.session.limiter.open();
        self.watch_closely(true);
        self.transfer.rounds()?.open_last();
        if let Some(streams) = &self.transfer.streams {
            streams.finish();
        }
        self.transfer.sync()?;
        self.transfer.step(SwitchoverStep::LastSync);
        let has_end = main.with(|stream| shared.guest.source.send_switchover_start(stream))?;
        self.send_last_round()?;
        // Pages that were sent before their memory failed are outdated by now, or the guest was informed and does
        // not use them. Which of the two holds is unknown, so the guest stays here.
        MigrationError::check_memory(&shared.guest.ram)?;
        self.transfer.step(SwitchoverStep::LastPages);
        let is_on_lanes = self.transfer.streams.as_ref().is_some_and(|streams| streams.on_lanes().is_some());
        if is_on_lanes {
            self.send_rest_of_streams()?;
        }
        if self.transfer.course.pages_sent(&main)? {
            self.transfer.step(SwitchoverStep::Streams);
        }
        // The lanes have written their last SYNC, and `run_dry` its flush. END therefore contains no flush.
        if has_end {
            self.transfer.carrier()?.end_ram()?;
        }
        if let Some(streams) = self.transfer.streams.as_ref().filter(|_| !is_on_lanes) {
            streams.send_in_turn(&mut self.transfer.waits, &main)?;
            self.transfer.step(SwitchoverStep::Streams);
        }
        let run_state = self.transfer.run_state_before();
        main.with(|stream| {
            stream.mark_devices();
            self.transfer.course.write_devices(stream, run_state)
        })?;
        self.transfer.step(SwitchoverStep::Devices);
        if let Some(stored) = self.transfer.carrier()?.store() {
            stored?;
            self.transfer.step(SwitchoverStep::Prepare);
        }
        MigrationError::check_same_ram(&call("Vm::ram", || shared.guest.vm.ram()), &shared.guest.ram)?;
        // Without a return path this is the commit.
        MigrationError::check_memory(&shared.guest.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    /// Sends the pages that the last sync found.
    fn send_last_round(&mut self) -> Result<(), Break> {
        self.transfer.publish(false)?;
        let round = Arc::clone(self.transfer.rounds()?.round());
        self.transfer.run_dry(&round)
    }

    /// Sends the rest of the device streams, after RAM's last page.
    fn send_rest_of_streams(&mut self) -> Result<(), Break> {
        if let Some(streams) = &self.transfer.streams {
            streams.await_lanes(&mut self.transfer.waits)?;
        }
        self.transfer.step(SwitchoverStep::Streams);
        // Every lane writes one more barrier: after the destination has seen its flush, it has every chunk.
        self.send_last_round()
    }

    /// Performs `SendEof`. The machine has committed, so the guest stays stopped even if this fails.
    ///
    /// A seeding commits nothing.
    pub(super) fn send_eof(&mut self) {
        self.watch_closely(false);
        if self.shared.capabilities.return_path {
            self.transfer.step(SwitchoverStep::Prepare);
        }
        let (sent, failed) = match &self.transfer.carrier {
            Some(carrier) => (carrier.end(), carrier.end_failed()),
            None => (Err(not_open()), Fed::EofFailed),
        };
        if let Some(carrier) =
            self.transfer.carrier.as_ref().filter(|_| !self.transfer.course.keeps_channels())
        {
            carrier.say_goodbye();
        }
        match sent {
            Ok(()) => self.shared.report(Fed::EofSent),
            Err(error) => {
                self.shared.note_error(error);
                self.shared.report(failed);
            }
        }
    }
}
