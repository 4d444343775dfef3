//! Plays a case whose primary is killed: starts both sides, applies the blow, and collects the observations.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Signal;
use sterna_arbiter::Role;
use sterna_guests::ProcessGuest;
use sterna_standby::machines::standby;
use sterna_standby::{Standby, StandbyContact, VmSurvivor};

use super::Failure;
use super::account::{self, Account};
use super::blow::{Blow, Kill, Planted, When};
use super::judge::{Seen, Verdict};
use super::packets::Packets;
use super::primary::claims;
use super::process::{Process, Told};
use crate::colo::LONGEST;
use crate::colo::play::{Again, until};
use crate::colo::vm::{Plans, Troubled};
use crate::colo::voice::Voice;

/// Time limit for a named state. The blow is applied without it afterwards.
const STATE: Duration = Duration::from_secs(2);

impl Kill {
    pub(super) fn play(
        &self,
        program: &Path,
        (seed, number, again): (u64, u64, u64),
        planted: Option<Planted>,
    ) -> Result<Verdict, Failure> {
        let directory = tempfile::tempdir().map_err(|error| format!("a directory: {error}"))?;
        let (tries, packets) = (again.to_string(), Packets::new()?);
        let arbiter = format!("file:{}", directory.path().display());
        let guest = ProcessGuest::waiting(self.case.guest.clone()).map_err(|error| error.to_string())?;
        let account = Account::of(&guest, |_| {});
        let says = Voice::new(&guest, Duration::ZERO)?;
        let again = Arc::<Mutex<Vec<(Again, String)>>>::default();
        let survivor = VmSurvivor::new(Troubled::new(&guest, &Arc::<Plans>::default()))
            .map_err(|error| error.to_string())?
            .saying_again({
                let (again, gate, guest) = (Arc::clone(&again), Arc::clone(&says.gate), Arc::clone(&guest));
                move |position, bytes| {
                    let steps = guest.progress().total_steps();
                    let found = account::of(&guest).unwrap_or_else(|why| why);
                    again.lock().push((Again { position, bytes: bytes.to_vec(), steps }, found));
                    gate.say_again(position, bytes);
                }
            });
        let standby = self.case.standby(survivor, claims(&arbiter, Role::Standby)?)?;
        let mut arguments = vec![
            seed.to_string(),
            number.to_string(),
            tries,
            standby.address().to_string(),
            arbiter,
            packets.address().to_string(),
        ];
        arguments.extend(planted.map(|planted| planted.label().to_owned()));
        let mut primary = Process::spawn(program, &arguments)?;
        self.await_moment(&mut primary, &standby)?;
        let seen = self.strike((primary, packets), &standby)?;
        let again = again.lock().clone();
        seen.judge((&guest, says), &account, &again).map_err(Failure::Wrong)
    }

    fn await_moment(&self, primary: &mut Process, standby: &Standby) -> Result<(), Failure> {
        let mut is_gone = false;
        until(|| {
            is_gone = primary.has_ended();
            is_gone
                || primary.told().ended.is_some()
                || standby.contact().is_some_and(|contact| contact.held() > 0)
        })?;
        primary.arm();
        until(|| {
            is_gone |= primary.has_ended();
            is_gone || primary.told().is_armed
        })?;
        if is_gone {
            return Err(Failure::Wrong(format!("the primary ended by itself: {:?}", primary.told())));
        }
        match self.when {
            When::After(after) | When::HandingOver(after) => std::thread::sleep(after),
            _ => {
                let begin = Instant::now();
                let is_over = |told: Told| told.has_reached || told.ended.is_some();
                while !is_over(primary.told()) && begin.elapsed() < STATE {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
        Ok(())
    }

    fn strike(&self, (primary, packets): (Process, Packets), standby: &Standby) -> Result<Seen, Failure> {
        let contact = standby.contact().ok_or_else(|| "no contact".to_owned())?;
        let is_planned = matches!(self.when, When::HandingOver(_));
        let ended = primary.told().ended;
        if let Some(how) = ended.filter(|_| !is_planned) {
            return Err(if how.starts_with("Alone") {
                Failure::AloneBefore
            } else {
                Failure::Wrong(format!("the primary ended before the blow: {how}"))
            });
        }
        match self.blow {
            Blow::Kill => primary.signal(Signal::KILL)?,
            Blow::FreezeAndKill => {
                primary.signal(Signal::STOP)?;
                std::thread::sleep(self.case.terms.lease / 3);
                primary.signal(Signal::KILL)?;
            }
            Blow::FreezeAndWake => primary.signal(Signal::STOP)?,
        }
        let wakes = self.blow == Blow::FreezeAndWake;
        let outcome = outcome(&contact)?;
        let standby::Outcome::Running(checkpoint) = outcome else {
            let told = primary.told();
            drop(primary);
            return Err(match outcome {
                // The host did not schedule the primary, so its lease had ended, and it had the claim when it
                // was killed.
                standby::Outcome::Discarded(standby::Because::ClaimLost) => Failure::AloneBefore,
                _ => Failure::Wrong(format!("the guest is lost: {outcome:?}; {told:?}")),
            });
        };
        if !wakes {
            let (accounts, heard) = primary.end(true);
            return Ok(Seen { checkpoint, accounts, heard, packets: packets.end()?, woken: None });
        }
        // The frozen primary has written nothing since before the takeover, so all of its output has been
        // read.
        let before = (primary.heard_bytes(), packets.count());
        primary.signal(Signal::CONT)?;
        until(|| primary.told().ended.is_some())
            .map_err(|why| format!("the primary that woke: {why}: {:?}", primary.told()))?;
        let ended = primary.told().ended;
        let (accounts, heard) = primary.end(false);
        let packets = packets.end()?;
        Ok(Seen { checkpoint, accounts, heard, packets, woken: ended.map(|how| (before, how)) })
    }
}

fn outcome(contact: &StandbyContact) -> Result<standby::Outcome, String> {
    until(|| {
        if matches!(contact.state().state, standby::State::Unready | standby::State::Held) {
            // The operator retries the step that failed.
            let _ = contact.retry();
        }
        contact.state().outcome.is_some()
    })
    .map_err(|why| format!("the standby: {why}: {:?}", contact.state()))?;
    contact.wait(LONGEST).ok_or_else(|| "the standby has an outcome and gives none".to_owned())
}
