//! The pause of a checkpoint: last sync, saved devices, copied dirty pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::PAGE_SIZE;

use super::checkpointing::Checkpointing;
use super::seeding::write_checkpoint;
use super::travel::Taken;
use crate::error::MigrationError;
use crate::events::Event;
use crate::outgoing::main_stream::collector::DeviceCollector;
use crate::outgoing::protection::{LAST_PAUSES, Protecting, typical};
use crate::threads::{call, tried};
use crate::vm::RunState;

/// The result of a short pause.
pub(super) enum Paused {
    Taken(Taken),
    /// The guest has dirtied more pages than fit the staging memory now.
    NoRoom,
    /// The guest could not be resumed. The error is the checkpoint's, or else the VM's.
    Standing(MigrationError),
    /// The protection's machine withholds the guest and decides its future.
    Withheld,
}

impl Checkpointing<'_> {
    /// Pauses the guest shortly, as an operator's act.
    ///
    /// Operators and withholders of the guest wait for its end.
    pub(super) fn pause(
        &mut self,
        number: u64,
        devices: &mut DeviceCollector,
    ) -> Result<Paused, MigrationError> {
        let protecting = self.protecting;
        let ram = self.transfer.shared.guest.ram.clone();
        let mut is_kept = false;
        let paused = ram.while_free(|| -> Result<Paused, MigrationError> {
            let vm = Arc::clone(&self.transfer.shared.guest.vm);
            let was_running = call("SourceVm::run_state", || vm.run_state()) == RunState::Running;
            self.transfer.guest.ran_before = was_running;
            self.transfer.shared.stop_vm(was_running)?;
            if was_running {
                self.transfer.shared.tell(&Event::Stopped);
            }
            let taken = tried("a checkpoint", || self.take_if_room(number, devices));
            // The pause may have lasted longer than the lease. Then the standby may run the guest already.
            is_kept = was_running && !protecting.overseer.may_guest_run();
            if is_kept {
                protecting.switch.keep();
                return taken;
            }
            if was_running && let Err(error) = self.transfer.shared.resume_vm() {
                return Ok(Paused::Standing(taken.err().unwrap_or_else(|| error.into())));
            }
            if was_running {
                self.transfer.shared.tell(&Event::Resumed);
            }
            taken
        });
        if is_kept {
            self.transfer.shared.keep_for_overseer(protecting);
        }
        match paused {
            Ok(Ok(Paused::Standing(error))) => {
                self.transfer.shared.keep_standing(protecting);
                Err(error)
            }
            Ok(paused) => paused,
            Err(_) => Ok(Paused::Withheld),
        }
    }

    fn take_if_room(&mut self, number: u64, devices: &mut DeviceCollector) -> Result<Paused, MigrationError> {
        let protecting = self.protecting;
        self.transfer.last_sync()?;
        if !protecting.staging.has_room(self.transfer.rounds()?.found_since()) {
            return Ok(Paused::NoRoom);
        }
        self.take_synced(number, (false, true), devices).map(Paused::Taken)
    }

    /// Takes a checkpoint that is not copied. The guest is paused until it is sent.
    pub(super) fn take_uncopied(
        &mut self,
        number: u64,
        is_last: bool,
        devices: &mut DeviceCollector,
    ) -> Result<Taken, MigrationError> {
        self.drop_ahead()?;
        self.transfer.last_sync()?;
        self.take_synced(number, (is_last, false), devices)
    }

    /// Takes the checkpoint after the last sync. The guest is paused.
    fn take_synced(
        &mut self,
        number: u64,
        (is_last, is_copied): (bool, bool),
        devices: &mut DeviceCollector,
    ) -> Result<Taken, MigrationError> {
        let protecting = self.protecting;
        let shared = Arc::clone(&self.transfer.shared);
        MigrationError::check_memory(&shared.guest.ram)?;
        let rounds = self.transfer.rounds.as_mut().ok_or_else(crate::outgoing::transfer::no_rounds)?;
        let (round, late) = rounds.make_checkpoint()?;
        if is_copied {
            protecting.staging.stage(&late)?;
        }
        let late_pages = late.count();
        let run_state = self.transfer.run_state_before();
        let unsaid = protecting.overseer.end_epoch(number);
        let devices = devices
            .collect(|stream| write_checkpoint(&shared, protecting, stream, (run_state, &unsaid, false)))?;
        self.transfer.check_last_sync()?;
        protecting.overseer.taken(number, is_last)?;
        Ok(Taken { number, round, late_pages, devices, is_copied, at: Instant::now() })
    }
}

pub(super) fn note_pause(protecting: &Protecting, (pages, device_bytes): (u64, u64), pause: Duration) {
    let mut counts = protecting.counts.lock();
    counts.taken += 1;
    counts.pages += pages;
    counts.last_pages = pages;
    counts.device_bytes += device_bytes;
    if counts.pauses.len() == LAST_PAUSES {
        counts.pauses.pop_front();
    }
    counts.pauses.push_back(pause);
    counts.pause = Some(typical(counts.pause, pause));
    tracing::trace!(bytes = pages * PAGE_SIZE as u64, ?pause, "a checkpoint was taken");
}
