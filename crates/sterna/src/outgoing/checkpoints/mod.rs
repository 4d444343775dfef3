//! Checkpoints of a protected guest, after its seeding (`specs/colo.md §3` to §5, `specs/replica.md §4`).
//!
//! During a pause of the guest the last sync is done and the devices are saved. The dirty pages are copied or
//! write-protected, unless they were copied [before](ahead). Then the guest resumes, and the checkpoint is sent.
//! Further checkpoints may be taken meanwhile; they wait until they are sent. If the pages do not fit the staging
//! memory although no checkpoint is in flight, the guest is paused until they are sent.

mod ahead;
mod checkpointing;
pub(super) mod seeding;
mod service;
mod standing;
mod taking;
mod travel;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_wire::colo::MessageKind;

use super::transfer::Transfer;
use crate::device_stream::AskCheckpoint;
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::main_stream::collector::DeviceCollector;
use crate::outgoing::protection::{Protecting, Seen, Staging, Withholder, counts_from};
use crate::threads::{call, caught};
use crate::vm::RunState;
use ahead::Ahead;
use checkpointing::Checkpointing;
use taking::{Paused, note_pause};
use travel::Travel;

/// The interval of checks for the standby's answer, when a checkpoint is due.
///
/// The answer comes over the contact.
const SHORT_LOOK: Duration = Duration::from_micros(200);
/// The interval between two checks while an earlier checkpoint must be sent first. Its messages wake the thread
/// earlier.
const LOOK: Duration = Duration::from_millis(20);

/// State of the loop that takes checkpoints.
struct Checkpoints {
    travel: Travel,
    devices: DeviceCollector,
    /// The number of the last checkpoint that was taken.
    number: u64,
    began: Instant,
    /// The time for which the guest was paused since then without a resulting checkpoint.
    in_vain: Duration,
    /// The next checkpoint does not fit the staging memory together with those in flight.
    waits_for_room: bool,
    ahead: Ahead,
}

/// Ends the copying of checkpoints, also in a panic.
struct Ends<'a>(&'a dyn Staging);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Performs `TakeCheckpoints`: returns when the machine has another action.
///
/// That is so after the protection has ended.
pub(super) fn take(transfer: &mut Transfer) -> Result<(), Break> {
    let Some(protecting) = transfer.shared.protecting.clone() else {
        return Err(MigrationError::Internal("a seeding without a protection".to_owned()).into());
    };
    // After the end of checkpoints, for any reason, no write of the guest may stay blocked.
    let ends = Ends(protecting.staging.as_ref());
    // The handover machine learns of no failure here. Without this, a panic would end checkpoints without a
    // message.
    let mut checkpointing = Checkpointing { transfer, protecting: &protecting };
    let followed = caught("a checkpoint", || {
        checkpointing.has_gone_on()?;
        checkpointing.follow_pace()
    });
    match followed.unwrap_or_else(|panic| Err(panic.into())) {
        Err(Break::Failed(error)) => {
            tracing::debug!(%error, "checkpoints end");
            drop(ends);
            protecting.inbox.fail(error.clone());
            // When one channel is lost, the others are closed. The first error in the inbox is the cause.
            let error = protecting.inbox.error().unwrap_or(error);
            transfer.shared.note_error(error.clone());
            protecting.overseer.failed(&error);
            // The protection's machine decides which side runs the guest now.
            transfer.waits.until(|| None::<()>)
        }
        other => other,
    }
}

impl Checkpointing<'_> {
    /// Fails unless the guest runs again after the seeding, if it ran before.
    fn has_gone_on(&mut self) -> Result<(), MigrationError> {
        let protecting = self.protecting;
        match self.transfer.guest.not_resumed.take() {
            None => Ok(()),
            Some(error) => {
                self.transfer.shared.keep_standing(protecting);
                Err(error)
            }
        }
    }

    fn follow_pace(&mut self) -> Result<(), Break> {
        let protecting = self.protecting;
        self.transfer.waits.until(|| protecting.inbox.take(MessageKind::CheckpointReady))??;
        if let Some(streams) = protecting.streams() {
            streams.limit(protecting.staging.limit_bytes(), &self.asking_for_checkpoints())?;
        }
        let devices = self.transfer.main()?.with(|stream| Ok(stream.device_collector()))?;
        let mut checkpoints = Checkpoints {
            travel: Travel::default(),
            devices,
            number: 0,
            began: Instant::now(),
            in_vain: Duration::ZERO,
            waits_for_room: false,
            ahead: Ahead::default(),
        };
        loop {
            self.await_next(&mut checkpoints)?;
            match protecting.take_wanted() {
                true => return self.last_checkpoint(&mut checkpoints),
                false => self.checkpoint(&mut checkpoints)?,
            }
        }
    }

    /// The callback with which a device requests a checkpoint when its changes reach their limit.
    fn asking_for_checkpoints(&self) -> AskCheckpoint {
        let shared = Arc::downgrade(&self.transfer.shared);
        Arc::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            if let Some(protecting) = &shared.protecting {
                protecting.want(false);
                shared.driver.nudge();
            }
        })
    }

    /// Waits until a checkpoint is due and may be taken. Checkpoints in flight are sent meanwhile.
    fn await_next(&mut self, now: &mut Checkpoints) -> Result<(), Break> {
        let protecting = self.protecting;
        loop {
            self.advance(&mut now.travel)?;
            if let Some(error) = protecting.inbox.error() {
                return Err(error.into());
            }
            let pace = *protecting.pace.lock();
            let lead = now.ahead.lead(protecting.counts.lock().last_pages);
            let left = due(protecting, now.began).saturating_duration_since(Instant::now() + lead);
            let (is_wanted, is_last) = protecting.wanted();
            // The guest is not protected until the first checkpoint is held. That one is therefore due
            // immediately.
            let is_due = now.number == 0 || is_wanted || left.is_zero();
            let stands_alone = is_last || now.waits_for_room;
            let has_room = match stands_alone {
                true => now.travel.is_empty(),
                false => self.may_join(&now.travel, pace.in_flight),
            };
            if is_due && has_room && protecting.overseer.may_take(is_last) {
                return Ok(());
            }
            let left = match is_due {
                // The standby's answer comes over the contact, which does not wake this thread.
                true if has_room => SHORT_LOOK,
                true => LOOK,
                false => left.min(pace.look()),
            };
            let shared = self.transfer.shared.clone();
            let is_news = || now.travel.has_news(&shared, protecting) || (!is_due && protecting.wanted().0);
            self.transfer.waits.at_most(left, || is_news().then_some(()))?;
        }
    }

    /// Whether another checkpoint may be taken while others are in flight.
    ///
    /// This is so if the link could have sent those in flight at its earlier rate, so that it is slow now.
    /// Earlier, another checkpoint would only wait. Device state in flight counts against the same limit as
    /// copies of pages.
    fn may_join(&self, travel: &Travel, in_flight: u8) -> bool {
        let protecting = self.protecting;
        travel.is_empty()
            || travel.count() < in_flight.into()
                && travel.device_bytes() < protecting.staging.limit_bytes()
                && travel.could_be_through()
    }

    /// Takes a checkpoint. If none is in flight, the standby is asked for room first, so that its state is as new
    /// as possible.
    fn checkpoint(&mut self, now: &mut Checkpoints) -> Result<(), Break> {
        let protecting = self.protecting;
        self.copy_ahead(&mut now.ahead)?;
        now.began = counted(protecting, now.began);
        if now.travel.is_empty() {
            let in_flight = protecting.pace.lock().in_flight;
            self.await_room_for(&mut now.travel, in_flight)?;
        }
        let vm = &self.transfer.shared.guest.vm;
        let holds_writes = call("SourceVm::may_hold_writes", || vm.may_hold_writes());
        if let Some(text) = protecting.staging.prepare(holds_writes) {
            self.transfer.shared.tell(&Event::Warning(text));
        }
        let stopped = Instant::now();
        match self.pause(now.number + 1, &mut now.devices)? {
            Paused::Taken(taken) => {
                protecting.staging.go_on();
                now.ahead.paused(taken.late_pages);
                has_taken(protecting, now, taken.brought(), stopped.elapsed());
                now.travel.push(taken);
                Ok(())
            }
            Paused::NoRoom if now.travel.is_empty() => {
                now.in_vain += stopped.elapsed();
                self.uncopied(now)
            }
            Paused::NoRoom => {
                // The guest runs until the checkpoints in flight are held. Then there may be room.
                self.drop_ahead()?;
                now.in_vain += stopped.elapsed();
                now.waits_for_room = true;
                protecting.want(false);
                Ok(())
            }
            Paused::Standing(error) => Err(error.into()),
            // No other checkpoint is taken. Those in flight arrive if the connection lasts.
            Paused::Withheld => self.travel_until(&mut now.travel, |_| false),
        }
    }

    /// Takes a checkpoint for which the guest is paused until all of it is sent.
    fn uncopied(&mut self, now: &mut Checkpoints) -> Result<(), Break> {
        let protecting = self.protecting;
        self.await_room(&mut now.travel)?;
        let stopped = Instant::now();
        self.withhold(Withholder::Checkpoint)?;
        let taken = self.take_uncopied(now.number + 1, false, &mut now.devices);
        let sent = taken.map_err(Break::from).and_then(|taken| {
            let brought = taken.brought();
            now.travel.push(taken);
            self.travel_until(&mut now.travel, Travel::is_empty)?;
            Ok(brought)
        });
        let went_on = self.transfer.shared.give_guest_back(protecting, Withholder::Checkpoint);
        let brought = sent?;
        went_on?;
        has_taken(protecting, now, brought, stopped.elapsed());
        protecting.counts.lock().unstaged += 1;
        Ok(())
    }

    /// Takes a checkpoint after which the guest stays stopped.
    fn last_checkpoint(&mut self, now: &mut Checkpoints) -> Result<(), Break> {
        let protecting = self.protecting;
        // The order may have come while others were in flight.
        self.travel_until(&mut now.travel, Travel::is_empty)?;
        self.await_room(&mut now.travel)?;
        let stopped = Instant::now();
        self.withhold(Withholder::Overseer)?;
        let taken = self.take_uncopied(now.number + 1, true, &mut now.devices)?;
        has_taken(protecting, now, taken.brought(), stopped.elapsed());
        now.travel.push(taken);
        self.travel_until(&mut now.travel, Travel::is_empty)?;
        // The standby may close its connections now, which is no error here.
        self.transfer.waits.until(|| None::<()>)
    }

    fn await_room(&mut self, travel: &mut Travel) -> Result<(), Break> {
        self.ask_for_room(travel)?;
        self.travel_until(travel, Travel::is_granted)
    }

    /// Waits for the standby's room, where several checkpoints may be in flight.
    ///
    /// A standby that does not answer delays the next checkpoint only for the time that a checkpoint needs.
    fn await_room_for(&mut self, travel: &mut Travel, in_flight: u8) -> Result<(), Break> {
        let protecting = self.protecting;
        let pages = protecting.counts.lock().last_pages;
        let Some(most) = travel.needs(pages).filter(|_| in_flight > 1) else {
            return self.await_room(travel);
        };
        self.ask_for_room(travel)?;
        let until = Instant::now() + most;
        loop {
            self.advance(travel)?;
            let left = until.saturating_duration_since(Instant::now());
            if travel.is_granted() || left.is_zero() {
                return Ok(());
            }
            let shared = self.transfer.shared.clone();
            self.transfer.waits.at_most(left, || travel.has_news(&shared, protecting).then_some(()))?;
        }
    }

    fn travel_until(&mut self, travel: &mut Travel, is_so: impl Fn(&Travel) -> bool) -> Result<(), Break> {
        let protecting = self.protecting;
        loop {
            self.advance(travel)?;
            if is_so(travel) {
                return Ok(());
            }
            let shared = self.transfer.shared.clone();
            self.transfer.waits.until(|| travel.has_news(&shared, protecting).then_some(()))?;
        }
    }

    fn withhold(&mut self, who: Withholder) -> Result<(), Break> {
        let protecting = self.protecting;
        self.transfer.guest.ran_before =
            call("SourceVm::run_state", || self.transfer.shared.guest.vm.run_state()) == RunState::Running;
        Ok(self.transfer.shared.withhold_guest(protecting, who)?)
    }
}

fn due(protecting: &Protecting, began: Instant) -> Instant {
    let pause = protecting.counts.lock().pause;
    let waits_since = protecting.overseer.output_waits_since();
    protecting.pace.lock().due(Seen { began, pause, waits_since })
}

/// The time from which the interval after the checkpoint that begins now is counted.
fn counted(protecting: &Protecting, last_began: Instant) -> Instant {
    let due = due(protecting, last_began);
    let pause = protecting.counts.lock().pause;
    let interval = protecting.pace.lock().interval(pause);
    counts_from(due, Instant::now(), interval)
}

fn has_taken(protecting: &Protecting, now: &mut Checkpoints, brought: (u64, u64), pause: Duration) {
    now.number += 1;
    now.waits_for_room = false;
    note_pause(protecting, brought, pause + std::mem::take(&mut now.in_vain));
}
