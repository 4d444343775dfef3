//! The switchover, with the guest stopped: the last pages, the devices, and the commit.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_wire::replica::Output;

use super::Control;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::interruption::Break;
use crate::threads::call;

impl Control {
    /// Performs `SendFinalState`: the last sync, the last round, END of RAM, every device.
    pub(super) fn send_final_state(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.main()?);
        // `max-bandwidth` protects other traffic from rounds without end; the downtime should be short.
        shared.limiter.open();
        self.watch_closely(true);
        self.rounds()?.open_last();
        if let Some(streams) = &self.streams {
            streams.finish();
        }
        self.sync()?;
        self.step(SwitchoverStep::LastSync);
        let has_end = main.with(|stream| shared.guest_source.send_switchover_start(stream))?;
        self.send_last_round()?;
        // Pages that were sent before they failed are old by now, or the guest was told and does without them: which of
        // the two is unknown, so the guest stays here.
        MigrationError::check_memory(&shared.ram)?;
        self.step(SwitchoverStep::LastPages);
        let is_on_lanes = self.streams.as_ref().is_some_and(|streams| streams.on_lanes().is_some());
        if is_on_lanes {
            self.send_rest_of_streams()?;
        }
        if shared.protecting.is_none() {
            shared.lanes.queue.end();
        }
        if let Some(streams) = &self.epoch_streams {
            streams.send_rest(&main)?;
            self.step(SwitchoverStep::Streams);
        }
        // The lanes have written their last SYNC, and `run_dry` its flush: END holds nothing more.
        match &self.rdma {
            _ if !has_end => {}
            Some(rdma) => rdma.end_ram(&main)?,
            None => main.with(|stream| stream.ram_part(true, false))?,
        }
        if let Some(streams) = self.streams.as_ref().filter(|_| !is_on_lanes) {
            streams.send_in_turn(&mut self.waits, &main)?;
            self.step(SwitchoverStep::Streams);
        }
        let run_state = self.run_state_before();
        main.with(|stream| {
            stream.mark_devices();
            if shared.protecting.is_none() {
                return shared.guest_source.send_devices(stream, run_state);
            }
            // Checkpoints have the sections of the seeding.
            self.write_checkpoint(stream, run_state, &Output::default(), true)
        })?;
        self.step(SwitchoverStep::Devices);
        if let Some(file) = &self.file {
            file.finish(&shared, &main)?;
            self.step(SwitchoverStep::Prepare);
        }
        MigrationError::check_same_ram(&call("Vm::ram", || shared.vm.ram()), &shared.ram)?;
        // Without a return path this is the commit.
        MigrationError::check_memory(&shared.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    /// What the last sync found.
    fn send_last_round(&mut self) -> Result<(), Break> {
        self.publish(false)?;
        let round = Arc::clone(self.rounds()?.round());
        self.run_dry(&round)
    }

    /// What remains of devices' streams, after RAM's last page.
    fn send_rest_of_streams(&mut self) -> Result<(), Break> {
        if let Some(streams) = &self.streams {
            streams.await_lanes(&mut self.waits)?;
        }
        self.step(SwitchoverStep::Streams);
        // One more barrier on every lane: when the destination has seen its flush, every chunk has come.
        self.send_last_round()
    }

    /// Performs `SendEof`. The machine has committed: whatever happens here, the guest stays stopped. A seeding commits nothing.
    pub(super) fn send_eof(&mut self) {
        if let Some(file) = &self.file {
            file.publish(&self.shared);
            return;
        }
        self.watch_closely(false);
        if self.shared.capabilities.return_path {
            self.step(SwitchoverStep::Prepare);
        }
        let sent = self.main().and_then(|main| main.with(|stream| self.shared.guest_source.send_end(stream)));
        let sent = match &self.rdma {
            Some(rdma) => sent.and_then(|()| rdma.finish(self.shared.capabilities.return_path)),
            None => sent,
        };
        // A QEMU demands it after the last packet (specs/stream.md §3.7). A lane whose end is lost has lost
        // nothing else: its last SYNC is out.
        let over = if self.shared.protecting.is_some() { &[][..] } else { &self.multifd };
        for channel in over {
            if let Err(error) = channel.say_goodbye() {
                tracing::debug!(%error, "end of a multifd channel");
            }
        }
        match sent {
            Ok(()) => self.shared.report(Fed::EofSent),
            Err(error) => {
                self.shared.note_error(error);
                self.shared.report(Fed::EofFailed);
            }
        }
    }
}
