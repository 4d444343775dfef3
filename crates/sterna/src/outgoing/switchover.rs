//! The switchover, with the guest stopped: the last pages, the devices, and the commit.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;

use super::control::Control;
use super::file;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;

impl Control {
    /// Performs `SendFinalState`: the last harvest, the last pass, END of RAM, every device.
    pub(super) fn send_final_state(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        // `max-bandwidth` protects other traffic from rounds without end; the pause should be short.
        shared.limiter.open();
        self.open_last_round();
        self.finish_streams();
        self.harvest()?;
        self.step(SwitchoverStep::LastSync);
        let has_end = self.with_main(|stream| shared.origin.send_switchover_start(stream))?;
        self.next_pass();
        let Some(pass) = self.running_pass() else { return Ok(()) };
        if !self.run_dry(&pass)? {
            return Ok(());
        }
        // Pages that were sent before they failed are old by now, or the guest was told and does without them: nobody
        // knows which, so that it stays here.
        MigrationError::check_memory(&shared.ram)?;
        self.step(SwitchoverStep::LastPages);
        if !self.send_streams()? {
            return Ok(());
        }
        shared.lanes.queue.end();
        // The lanes have written their last SYNC, and `run_dry` its flush: END holds nothing more.
        if has_end {
            self.with_main(|stream| stream.ram_part(true, false))?;
        }
        if !self.send_streams_in_turn()? {
            return Ok(());
        }
        let run_state = self.run_state_before();
        self.with_main(|stream| shared.origin.send_devices(stream, run_state))?;
        self.step(SwitchoverStep::Devices);
        if self.file.is_some() {
            file::finish(self)?;
        }
        // Without a return path this is the commit.
        MigrationError::check_memory(&shared.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    /// Performs `SendEof`. The machine has committed: whatever happens here, the guest stays stopped.
    pub(super) fn send_eof(&mut self) -> Result<(), MigrationError> {
        if self.file.is_some() {
            file::publish(self);
            return Ok(());
        }
        if self.shared.capabilities.return_path {
            self.step(SwitchoverStep::Prepare);
        }
        let sent = self.with_main(|stream| self.shared.origin.send_end(stream));
        // A QEMU demands it behind the last packet (specs/stream.md §3.7). A lane whose end is lost has lost
        // nothing else: its last SYNC is out.
        for channel in &self.multifd {
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
        Ok(())
    }
}
