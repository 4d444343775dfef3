//! Properties that every disturbed protection must have at its end.

use sterna::ram::Custody;
use sterna::{RunState, SourceVm, Vm};
use sterna_guests::ProcessGuest;
use sterna_standby::machines::{primary::Outcome, standby};

use super::LONGEST;
use super::arbiter::Side;
use super::case::Case;
use super::play::{Ends, Play, until};
use super::trouble::Trouble;
use super::voice::numbers;
use crate::judge::whole;

impl Play {
    /// Checks the case and returns the side that has the guest. `None`: the guest was lost with a standby
    /// that had won the claim.
    pub(super) fn judge(&mut self, case: &Case, ends: Ends) -> Result<Option<Side>, String> {
        let survivor = self.owner(case, ends)?;
        self.never_both(case)?;
        match survivor {
            Some(Side::Primary) => whole(&self.here),
            Some(Side::Standby) => whole(&self.there),
            None => Ok(()),
        }
        .map_err(|why| format!("{ends:?}: at {survivor:?}: {why}"))?;
        self.observer(survivor).map_err(|why| format!("{ends:?}: what was heard: {why}"))?;
        Ok(survivor)
    }

    fn owner(&self, case: &Case, ends: Ends) -> Result<Option<Side>, String> {
        let run = || (runs(&self.here), runs(&self.there));
        let (expected, survivor) = match ends {
            (Outcome::Alone(_) | Outcome::Failed(_), None | Some(standby::Outcome::Discarded(_))) => {
                ((true, false), Some(Side::Primary))
            }
            (Outcome::Lost | Outcome::HandedOver, Some(standby::Outcome::Running(_))) => {
                ((false, true), Some(Side::Standby))
            }
            // The standby died with its claim, perhaps after it had started the guest.
            (Outcome::Lost, None)
                if case.trouble == Trouble::DropStandby && self.arbiter.owner() == Some(Side::Standby) =>
            {
                ((false, runs(&self.there)), runs(&self.there).then_some(Side::Standby))
            }
            (Outcome::HandedOver, None) if case.trouble == Trouble::DropStandby => {
                ((false, true), Some(Side::Standby))
            }
            _ => {
                return Err(format!(
                    "the ends do not fit: {ends:?}; runs at (primary, standby): {:?}",
                    run()
                ));
            }
        };
        if run() != expected {
            return Err(format!("runs at (primary, standby): {:?} after {ends:?}", run()));
        }
        let (here, there) = (self.here.ram().custody(), self.there.ram().custody());
        let is_right = match survivor {
            Some(Side::Primary) => {
                // A dropped standby may be about to release its guest.
                here.may_run() && (self.standby.is_none() || there == Custody::NoGuest || ends.1.is_none())
            }
            Some(Side::Standby) => here == Custody::Gone && there == Custody::Arrived,
            None => here == Custody::Gone,
        };
        if !is_right || self.primary.migration().may_guest_run() != here.may_run() {
            return Err(format!("custody at (primary, standby): {:?} after {ends:?}", (here, there)));
        }
        if matches!(ends.1, Some(standby::Outcome::Discarded(_))) && self.there.has_guest() {
            return Err(format!("the standby still has the guest's state after {ends:?}"));
        }
        Ok(survivor)
    }

    /// Checks that the guest never ran on both sides. An exception: the host paused this process for longer
    /// than the terms allow.
    fn never_both(&self, case: &Case) -> Result<(), String> {
        let seen = self.sampler.seen();
        let Some((_, lasting)) = seen.both else { return Ok(()) };
        if seen.longest_gap > case.terms.margin / 4 {
            tracing::warn!(?seen, "both sides ran on a host that stood still");
            return Ok(());
        }
        Err(format!("both sides ran the guest for {lasting:?}; {seen:?}"))
    }

    /// Heard output is never ahead of the survivor, is complete, and is in order.
    fn observer(&mut self, survivor: Option<Side>) -> Result<(), String> {
        self.here_says.end();
        let said = self.here_says.said();
        if survivor == Some(Side::Primary) {
            if !self.here_says.gate.wait_until_empty(LONGEST) {
                return Err("something waits in the gate of a guest that is alone".into());
            }
            let heard = self.here_says.heard();
            let (heard_len, said_len) = (heard.len(), said.len());
            if heard != said {
                return Err(format!("{heard_len} bytes, and {said_len} were said"));
            }
            return numbers(&heard).map(drop);
        }
        let heard = self.here_says.heard();
        if !said.starts_with(&heard) {
            return Err("the primary was heard out of order".into());
        }
        if survivor.is_none() {
            return numbers(&heard).map(drop);
        }
        let all = self.again.lock().clone();
        let [again] = all.as_slice() else { return Err(format!("said again {} times", all.len())) };
        let position = again.position as usize;
        let Some(tail) = heard.get(position..) else {
            return Err(format!(
                "the survivor goes on from byte {position}, and the primary was heard up to {}",
                heard.len()
            ));
        };
        if !again.bytes.starts_with(tail) {
            return Err(format!(
                "the primary was heard ahead of its survivor: {} bytes after byte {position}, of which it knows {}",
                tail.len(),
                again.bytes.len()
            ));
        }
        if !said[position..].starts_with(&again.bytes) {
            return Err("the survivor says again what was not said".into());
        }
        let known = [&heard[..position], &again.bytes].concat();
        if let Some(ahead) = numbers(&known)?.into_iter().find(|steps| *steps > again.steps) {
            return Err(format!("step {ahead} was heard of, and the survivor was at {}", again.steps));
        }
        self.survivor_is_heard(&known, &heard[..position], again.bytes.len())
    }

    /// The survivor's output starts with the repeated bytes; then new output follows.
    fn survivor_is_heard(&mut self, known: &[u8], before: &[u8], again: usize) -> Result<(), String> {
        until(|| self.there_says.heard().len() > again)?;
        self.there_says.end();
        let whole = [before, &self.there_says.heard()].concat();
        if !whole.starts_with(known) {
            return Err("the survivor was heard out of order".into());
        }
        numbers(&whole).map(drop)
    }
}

fn runs(guest: &ProcessGuest) -> bool {
    guest.run_state() == RunState::Running
}
