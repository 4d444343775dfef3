//! The switchover, with the guest stopped: the last pages, the devices, and the commit.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::main::{Command, encode_end};
use sterna_wire::vmdesc;

use super::control::Control;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;

impl Control {
    /// Performs `SendFinalState`: the last harvest, the last pass, END of RAM, every device.
    pub(super) fn send_final_state(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        // `max-bandwidth` protects other traffic from rounds without end; the pause should be short.
        shared.limiter.open();
        self.open_last_round();
        self.harvest()?;
        self.step(SwitchoverStep::LastSync);
        self.commands(&[Command::SwitchoverStart])?;
        self.next_pass();
        let Some(pass) = self.running_pass() else { return Ok(()) };
        if !self.run_dry(&pass)? {
            return Ok(());
        }
        shared.lanes.queue.end();
        // The lanes have written their last SYNC, and `run_dry` its flush: END holds nothing more.
        self.with_main(|stream| stream.ram_part(true, false))?;
        self.step(SwitchoverStep::LastPages);
        self.send_devices()?;
        self.step(SwitchoverStep::Devices);
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    fn send_devices(&mut self) -> Result<(), MigrationError> {
        let vm = Arc::clone(&self.shared.vm);
        let state = GlobalState { run_state: self.run_state_before().to_owned(), suspended: Some(false) };
        let body = state.encode().map_err(MigrationError::wire("main channel"))?;
        let header =
            (global_state::SECTION_NAME, global_state::SECTION_INSTANCE, global_state::SECTION_VERSION);
        self.with_main(|stream| stream.full_section(header, &body, false))?;
        for device in vm.devices() {
            let body = device.save()?;
            let name = device.name();
            let header = (name.as_str(), device.instance(), device.version());
            self.with_main(|stream| stream.full_section(header, &body, true))?;
        }
        Ok(())
    }

    /// Performs `SendEof`. The machine has committed: whatever happens here, the guest stays stopped.
    pub(super) fn send_eof(&mut self) -> Result<(), MigrationError> {
        if self.shared.capabilities.return_path {
            self.step(SwitchoverStep::Prepare);
        }
        let machine_type = self.shared.vm.machine_type();
        let sent = self.with_main(|stream| {
            let description = stream.description(&machine_type);
            stream.send(|out| {
                encode_end(out);
                vmdesc::encode(&description, out)
            })
        });
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
