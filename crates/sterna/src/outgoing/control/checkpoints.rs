//! Checkpoints of a protected guest, after its seeding (`specs/colo.md §3` to §5, `specs/replica.md §4`).
//!
//! The guest stands while the last sync is done, its devices are saved and its dirty pages are copied; then it goes on, and the checkpoint
//! travels. If the pages do not fit the staging memory, the guest stands until they are sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_wire::colo::{Message, MessageKind};
use sterna_wire::extension::COMPATIBILITY_SECTION;
use sterna_wire::replica::Output;

use super::Control;
use crate::device_stream::AskCheckpoint;
use crate::error::{MigrationError, VmError};
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::main_stream::MainStream;
use crate::outgoing::protection::{LAST_PAUSES, Protecting, Seen, Withholder, counts_from, typical};
use crate::threads::{call, caught, tried};
use crate::vm::RunState;

/// Between two looks whether a checkpoint that is due may be taken: the standby's answer is missing.
const SHORT_LOOK: Duration = Duration::from_micros(200);

/// A checkpoint that was taken.
struct Taken {
    /// Its round.
    round: u64,
    pages: u64,
    /// Devices' sections, and EOF.
    devices: Vec<u8>,
}

/// How a short pause ended.
enum Paused {
    Taken(Taken),
    /// More was dirtied than may be staged.
    NoRoom,
    /// The guest could not be resumed.
    Standing(MigrationError),
}

impl Control {
    /// Performs `TakeCheckpoints`: returns when the machine wants something else done, which it does when the protection ends.
    pub(super) fn take_checkpoints(&mut self) -> Result<(), Break> {
        let Some(protecting) = self.shared.protecting.clone() else {
            return Err(MigrationError::Internal("a seeding without a protection".to_owned()).into());
        };
        // Here the handover machine hears of no failure: a panic must not end checkpoints without a word.
        let followed = caught("a checkpoint", || self.follow_pace(&protecting));
        match followed.unwrap_or_else(|panic| Err(panic.into())) {
            Err(Break::Failed(error)) => {
                tracing::debug!(%error, "checkpoints end");
                protecting.inbox.fail(error.clone());
                self.shared.note_error(error.clone());
                protecting.overseer.failed(&error);
                // The protection's machine decides who runs the guest now.
                self.waits.until(|| None::<()>)
            }
            other => other,
        }
    }

    fn follow_pace(&mut self, protecting: &Protecting) -> Result<(), Break> {
        self.hear(protecting, MessageKind::CheckpointReady)?;
        if let Some(streams) = &self.epoch_streams {
            streams.limit(protecting.staging.limit_bytes(), &self.asking_for_checkpoints())?;
        }
        let mut number = 0;
        let mut began = Instant::now();
        loop {
            self.await_next(protecting, began)?;
            began = counted(protecting, began);
            let is_last = protecting.take_wanted();
            number += 1;
            self.checkpoint(protecting, number, is_last)?;
            if is_last {
                // What the standby does with its connections is its own affair now.
                return self.waits.until(|| None::<()>);
            }
        }
    }

    /// How a device asks for a checkpoint whose changes have come to their limit.
    fn asking_for_checkpoints(&self) -> AskCheckpoint {
        let shared = Arc::downgrade(&self.shared);
        Arc::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            if let Some(protecting) = &shared.protecting {
                protecting.want(false);
                shared.driver.nudge();
            }
        })
    }

    /// Waits until a checkpoint is due and may be taken.
    fn await_next(&mut self, protecting: &Protecting, last_began: Instant) -> Result<(), Break> {
        loop {
            if let Some(error) = protecting.inbox.error() {
                return Err(error.into());
            }
            let left = due(protecting, last_began).saturating_duration_since(Instant::now());
            let (is_wanted, is_last) = protecting.wanted();
            let is_due = is_wanted || left.is_zero();
            if is_due && protecting.overseer.may_take(is_last) {
                return Ok(());
            }
            // What it waits for comes without a nudge: the standby's answer, by way of the contact.
            let look = protecting.pace.lock().look();
            let left = if is_due { SHORT_LOOK } else { left.min(look) };
            self.waits.at_most(left, || (!is_due && protecting.wanted().0).then_some(()))?;
        }
    }

    /// Takes a checkpoint and sends it. When this returns, the standby holds it.
    fn checkpoint(&mut self, protecting: &Protecting, number: u64, is_last: bool) -> Result<(), Break> {
        self.say(&[Message::CheckpointRequest])?;
        self.hear(protecting, MessageKind::CheckpointReply)?;
        let stopped = Instant::now();
        let taken = if is_last {
            self.withhold(protecting, Withholder::Overseer)?;
            self.take(protecting, number, true, false)?
        } else {
            match self.pause(protecting, number)? {
                Paused::Taken(taken) => taken,
                Paused::NoRoom => return self.unstaged(protecting, number, stopped),
                Paused::Standing(error) => return Err(error.into()),
            }
        };
        note_pause(protecting, &taken, stopped.elapsed());
        let resumed = Instant::now();
        self.send(protecting, &taken)?;
        protecting.staging.clear();
        let mut counts = protecting.counts.lock();
        counts.received += 1;
        counts.last_transfer = resumed.elapsed();
        Ok(())
    }

    /// A short pause: operators wait meanwhile. It touches no handover machine: who feeds that may wait for this pause.
    fn pause(&mut self, protecting: &Protecting, number: u64) -> Result<Paused, Break> {
        let ram = self.shared.ram.clone();
        let paused = ram.while_free(|| -> Result<Paused, MigrationError> {
            let vm = Arc::clone(&self.shared.vm);
            let was_running = call("SourceVm::run_state", || vm.run_state()) == RunState::Running;
            self.ran_before = was_running;
            self.shared.stop_vm(was_running)?;
            if was_running {
                self.shared.tell(&Event::Stopped);
            }
            let taken = tried("a checkpoint", || self.take_if_room(protecting, number));
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
                Err(error.into())
            }
            Ok(paused) => Ok(paused?),
            // The protection's machine withholds the guest: it says what becomes of it.
            Err(_) => self.waits.until(|| None),
        }
    }

    fn take_if_room(&mut self, protecting: &Protecting, number: u64) -> Result<Paused, MigrationError> {
        let found = self.sync()?;
        if !protecting.staging.has_room(found.next_pages) {
            return Ok(Paused::NoRoom);
        }
        self.take_synced(protecting, number, (false, true)).map(Paused::Taken)
    }

    /// The guest stands until all of the checkpoint is sent.
    fn unstaged(&mut self, protecting: &Protecting, number: u64, stopped: Instant) -> Result<(), Break> {
        self.withhold(protecting, Withholder::Checkpoint)?;
        let sent = self.take(protecting, number, false, false).map_err(Break::from).and_then(|taken| {
            self.send(protecting, &taken)?;
            Ok(taken)
        });
        let went_on = self.give_back(protecting, Withholder::Checkpoint);
        let taken = sent?;
        went_on?;
        note_pause(protecting, &taken, stopped.elapsed());
        let mut counts = protecting.counts.lock();
        counts.unstaged += 1;
        counts.received += 1;
        Ok(())
    }

    fn take(
        &mut self,
        protecting: &Protecting,
        number: u64,
        is_last: bool,
        stages: bool,
    ) -> Result<Taken, MigrationError> {
        self.sync()?;
        self.take_synced(protecting, number, (is_last, stages))
    }

    /// The guest stands, and the last sync is done.
    fn take_synced(
        &mut self,
        protecting: &Protecting,
        number: u64,
        (is_last, stages): (bool, bool),
    ) -> Result<Taken, MigrationError> {
        let shared = Arc::clone(&self.shared);
        MigrationError::check_memory(&shared.ram)?;
        let rounds = self.rounds.as_mut().ok_or_else(super::no_rounds)?;
        let round = rounds.make_checkpoint()?;
        if stages {
            protecting.staging.stage(round.unsent())?;
        } else {
            protecting.staging.clear();
        }
        let run_state = self.run_state_before();
        let unsaid = protecting.overseer.end_epoch(number);
        let devices = self.main()?.with(|stream| {
            stream.collect_devices(|stream| self.write_checkpoint(stream, run_state, &unsaid, false))
        })?;
        protecting.overseer.taken(number, is_last)?;
        Ok(Taken { round: round.number(), pages: round.pages(), devices })
    }

    /// Writes all of a checkpoint's sections: the machine's, what changed in its devices' streams, and what the guest said.
    pub(super) fn write_checkpoint(
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
        stream.output(unsaid)
    }

    /// Sends what was taken, and hears that it is held.
    fn send(&mut self, protecting: &Protecting, taken: &Taken) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let main = self.main()?;
        self.say(&[Message::VmstateSend])?;
        main.with(|stream| stream.begin_checkpoint())?;
        self.rounds()?.enter_checkpoint();
        self.waits.until(|| match protecting.inbox.error() {
            Some(error) => Some(Err(error)),
            None => shared.lanes.are_through(taken.round).then_some(Ok(())),
        })??;
        main.with(|stream| stream.end_checkpoint(shared.capabilities.multifd))?;
        shared.lanes.queue.flushed(taken.round);
        let size = Message::VmstateSize { bytes: taken.devices.len() as u64 };
        main.with(|stream| {
            stream.send(|out| {
                size.encode(out)?;
                out.extend_from_slice(&taken.devices);
                Ok(())
            })
        })?;
        self.hear(protecting, MessageKind::VmstateReceived)?;
        self.hear(protecting, MessageKind::VmstateLoaded)
    }

    fn say(&mut self, messages: &[Message]) -> Result<(), MigrationError> {
        self.waits.was_not_silent();
        self.main()?
            .with(|stream| stream.send(|out| messages.iter().try_for_each(|message| message.encode(out))))
    }

    fn hear(&mut self, protecting: &Protecting, due: MessageKind) -> Result<(), Break> {
        Ok(self.waits.until(|| protecting.inbox.take(due))??)
    }

    fn withhold(&mut self, protecting: &Protecting, who: Withholder) -> Result<(), Break> {
        self.ran_before = call("SourceVm::run_state", || self.shared.vm.run_state()) == RunState::Running;
        Ok(self.shared.withhold_guest(protecting, who)?)
    }

    fn give_back(&mut self, protecting: &Protecting, who: Withholder) -> Result<(), Break> {
        Ok(self.shared.give_guest_back(protecting, who)?)
    }
}

impl super::Shared {
    /// Stops the guest, which no operator may let run from now on.
    pub(crate) fn withhold_guest(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        protecting.switch.withhold(who, || {
            // A short pause that is under way ends first.
            let runs = || call("SourceVm::run_state", || self.vm.run_state()) == RunState::Running;
            let was_running = self.ram.while_free(runs).unwrap_or(false);
            self.report(Fed::GuestWithheld { was_running });
            self.stop_vm(was_running).inspect_err(|_| self.report(Fed::GuestGivenBack))?;
            if was_running {
                self.tell(&Event::Stopped);
            }
            Ok(was_running)
        })
    }

    /// Lets it run again if it did before, unless somebody else withholds it.
    pub(crate) fn give_guest_back(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        protecting.switch.give_back(who, |was_running| {
            if was_running {
                self.resume_vm()?;
                self.tell(&Event::Resumed);
            }
            self.report(Fed::GuestGivenBack);
            Ok(())
        })
    }

    /// The guest ran, and could not be resumed: it is, when the protection ends with the guest here.
    fn keep_standing(&self, protecting: &Protecting) {
        let stood = protecting.switch.withhold(Withholder::Checkpoint, || {
            self.report(Fed::GuestWithheld { was_running: true });
            Ok(true)
        });
        debug_assert!(stood.is_ok(), "nothing here fails");
    }

    /// A panic is an error here: the guest runs as before.
    fn stop_vm(&self, was_running: bool) -> Result<(), VmError> {
        let stopped = caught("SourceVm::stop", || call("SourceVm::stop", || self.vm.stop()));
        stopped.unwrap_or_else(|panic| {
            if was_running && let Err(error) = self.resume_vm() {
                self.tell(&Event::Warning(format!("{error}, after {panic}")));
            }
            Err(VmError::new("SourceVm::stop", panic))
        })
    }

    fn resume_vm(&self) -> Result<(), VmError> {
        caught("SourceVm::resume", || call("SourceVm::resume", || self.vm.resume()))
            .unwrap_or_else(|panic| Err(VmError::new("SourceVm::resume", panic)))
    }
}

fn due(protecting: &Protecting, began: Instant) -> Instant {
    let pause = protecting.counts.lock().pause;
    let waits_since = protecting.overseer.output_waits_since();
    protecting.pace.lock().due(Seen { began, pause, waits_since })
}

/// From when the interval after the checkpoint counts that begins now.
fn counted(protecting: &Protecting, last_began: Instant) -> Instant {
    let due = due(protecting, last_began);
    let pause = protecting.counts.lock().pause;
    let interval = protecting.pace.lock().interval(pause);
    counts_from(due, Instant::now(), interval)
}

fn note_pause(protecting: &Protecting, taken: &Taken, pause: Duration) {
    let mut counts = protecting.counts.lock();
    counts.taken += 1;
    counts.pages += taken.pages;
    counts.last_pages = taken.pages;
    counts.device_bytes += taken.devices.len() as u64;
    if counts.pauses.len() == LAST_PAUSES {
        counts.pauses.pop_front();
    }
    counts.pauses.push_back(pause);
    counts.pause = Some(typical(counts.pause, pause));
    tracing::trace!(bytes = taken.pages * PAGE_SIZE as u64, ?pause, "a checkpoint was taken");
}
