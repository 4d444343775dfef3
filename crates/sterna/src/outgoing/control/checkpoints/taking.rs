//! The pause of a checkpoint: the last sync, the devices, a copy of the dirty pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::PAGE_SIZE;
use sterna_wire::extension::COMPATIBILITY_SECTION;
use sterna_wire::replica::Output;

use super::super::Control;
use super::travel::Taken;
use crate::error::MigrationError;
use crate::events::Event;
use crate::outgoing::main_stream::{DeviceCollector, MainStream};
use crate::outgoing::protection::{LAST_PAUSES, Protecting, typical};
use crate::threads::{call, tried};
use crate::vm::RunState;

/// How a short pause ended.
pub(super) enum Paused {
    Taken(Taken),
    /// More was dirtied than may be copied now.
    NoRoom,
    /// The guest could not be resumed.
    Standing(MigrationError),
    /// The protection's machine withholds the guest: it says what becomes of it.
    Withheld,
}

impl Control {
    /// A short pause: operators wait meanwhile. It touches no handover machine: who feeds that may wait for this pause.
    pub(super) fn pause(
        &mut self,
        protecting: &Protecting,
        number: u64,
        devices: &mut DeviceCollector,
    ) -> Result<Paused, MigrationError> {
        let ram = self.shared.ram.clone();
        let paused = ram.while_free(|| -> Result<Paused, MigrationError> {
            let vm = Arc::clone(&self.shared.vm);
            let was_running = call("SourceVm::run_state", || vm.run_state()) == RunState::Running;
            self.ran_before = was_running;
            self.shared.stop_vm(was_running)?;
            if was_running {
                self.shared.tell(&Event::Stopped);
            }
            let taken = tried("a checkpoint", || self.take_if_room(protecting, number, devices));
            if was_running && let Err(error) = self.shared.resume_vm() {
                return Ok(Paused::Standing(taken.err().unwrap_or_else(|| error.into())));
            }
            if was_running {
                self.shared.tell(&Event::Resumed);
            }
            taken
        });
        match paused {
            Ok(Ok(Paused::Standing(error))) => {
                self.shared.keep_standing(protecting);
                Err(error)
            }
            Ok(paused) => paused,
            Err(_) => Ok(Paused::Withheld),
        }
    }

    fn take_if_room(
        &mut self,
        protecting: &Protecting,
        number: u64,
        devices: &mut DeviceCollector,
    ) -> Result<Paused, MigrationError> {
        self.sync()?;
        if !protecting.staging.has_room(self.rounds()?.found_since()) {
            return Ok(Paused::NoRoom);
        }
        self.take_synced(protecting, number, (false, true), devices).map(Paused::Taken)
    }

    /// Takes one that is not copied: the guest stands until it is sent.
    pub(super) fn take_uncopied(
        &mut self,
        protecting: &Protecting,
        number: u64,
        is_last: bool,
        devices: &mut DeviceCollector,
    ) -> Result<Taken, MigrationError> {
        self.drop_ahead(protecting)?;
        self.sync()?;
        self.take_synced(protecting, number, (is_last, false), devices)
    }

    /// The guest stands, and the last sync is done.
    fn take_synced(
        &mut self,
        protecting: &Protecting,
        number: u64,
        (is_last, is_copied): (bool, bool),
        devices: &mut DeviceCollector,
    ) -> Result<Taken, MigrationError> {
        let shared = Arc::clone(&self.shared);
        MigrationError::check_memory(&shared.ram)?;
        let rounds = self.rounds.as_mut().ok_or_else(super::super::no_rounds)?;
        let (round, late) = rounds.make_checkpoint()?;
        if is_copied {
            protecting.staging.stage(&late)?;
        }
        let late_pages = late.count();
        let run_state = self.run_state_before();
        let unsaid = protecting.overseer.end_epoch(number);
        let devices = devices.collect(|stream| self.write_checkpoint(stream, run_state, &unsaid, false))?;
        protecting.overseer.taken(number, is_last)?;
        Ok(Taken { number, round, late_pages, devices, is_copied, at: Instant::now() })
    }

    /// Writes all of a checkpoint's sections but the last: the machine's, what changed in its devices' streams, and what the guest said.
    pub(in super::super) fn write_checkpoint(
        &self,
        stream: &mut MainStream,
        run_state: &str,
        unsaid: &Output,
        is_seeding: bool,
    ) -> Result<(), MigrationError> {
        let source = &self.shared.guest_source;
        source.send_devices(stream, run_state)?;
        if let Some(record) = call("Vm::compatibility", || source.vm().compatibility()) {
            let body = call("Device::save of the compatibility record", || record.save())?;
            stream.full_section((COMPATIBILITY_SECTION, record.instance(), record.version()), &body, true)?;
        }
        if let Some(streams) = &self.epoch_streams {
            streams.write_epoch(stream, is_seeding)?;
        }
        stream.output(unsaid)?;
        // A checkpoint's says what was sent, which nobody knows yet.
        if is_seeding { stream.announce_summaries() } else { Ok(()) }
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
