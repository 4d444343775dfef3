//! Properties that every case must have, whatever the blow: one side may run the guest, its memory is whole,
//! and it can migrate again.

use std::sync::Arc;
use std::time::Duration;

use sterna::outgoing::Refusal;
use sterna::ram::DirtyBitmaps;
use sterna::{Arrival, Outcome, RunState, SourceVm, Vm};
use sterna_devices::statebank::Verdict;
use sterna_guests::ProcessGuest;
use sterna_guests::checker::CheckError;

use crate::bank::Bank;
use crate::case::{Play, is_back, listen, start};
use crate::ledger::Ledger;
use crate::panics;
use crate::schedule::{Blow, Case};
use crate::settings::Settings;
use crate::stage::Stage;
use crate::staged::Staged;
use crate::stop::{Side, Stop};

type Judgement = Result<(), String>;

/// Checks the source's answer to a cancel at `stop`.
pub(crate) fn cancelled(stop: Stop, answer: Result<(), Refusal>) -> Judgement {
    let right = match (stop, &answer) {
        (Stop::Undecided, answer) => matches!(answer, Err(Refusal::CancelUndecided)),
        (stop, answer) if stop.is_acknowledged() => matches!(answer, Err(Refusal::NothingToCancel { .. })),
        (stop, answer) if stop.is_committed() => matches!(answer, Err(Refusal::CancelAfterCommit { .. })),
        (_, answer) => answer.is_ok(),
    };
    if right { Ok(()) } else { Err(format!("cancel was answered with {answer:?}")) }
}

/// Checks the destination's answer to being given up at `stop`.
pub(crate) fn abandoned<E: std::fmt::Debug>(stop: Stop, answer: Result<(), E>) -> Judgement {
    // After EOF, the guest is the destination's. While the migration is being undone, it may have failed
    // already.
    if answer.is_err() == stop.is_handed_over() || stop.is_undoing() {
        Ok(())
    } else {
        Err(format!("giving it up was answered with {answer:?}"))
    }
}

/// Judges a case that has settled.
pub(crate) fn judge(play: &Play) -> Judgement {
    let violations = play.ledger.violations();
    if !violations.is_empty() {
        return Err(violations.join("; "));
    }
    if let (Blow::Panic, panics::Effect::Holds, Some((vm, migration))) =
        (play.case.blow, panics::effect(play.case.stop), play.source.here())
    {
        panics::free_held(vm, migration, &play.ledger)?;
    }
    let source =
        play.source.here().map(|(vm, migration)| (vm, migration.outcome(), migration.may_guest_run()));
    let target = play.target.here().map(|(vm, incoming)| (vm, incoming.arrival()));
    let source_runs = match &source {
        Some((vm, Some(outcome), may_run)) => Some(at_source(play.case, vm, outcome, *may_run)?),
        Some((_, None, _)) => return Err("the source's migration has not ended".into()),
        None => None,
    };
    let target_runs = match &target {
        Some((vm, Some(arrival))) => Some(at_target(vm, arrival)?),
        Some((_, None)) => return Err("the incoming migration has not ended".into()),
        None => None,
    };
    let expected = expected(play);
    if (source_runs, target_runs) != expected {
        return Err(format!(
            "the guest runs (at the source, at the destination): {:?}, not {expected:?}",
            (source_runs, target_runs)
        ));
    }
    let owner = match (&source, &target, source_runs, target_runs) {
        (Some((vm, ..)), _, Some(true), _) => Some((*vm, Side::Source)),
        (_, Some((vm, _)), _, Some(true)) => Some((*vm, Side::Destination)),
        _ => None,
    };
    let (holder, both_here) = (play.ledger.holder(), source.is_some() && target.is_some());
    if let Some((_, side)) = owner.filter(|(_, side)| both_here && holder != Some(*side)) {
        return Err(format!("{side:?} runs the guest and {holder:?} holds its lease"));
    }
    if let Some((vm, side)) = owner {
        whole(&vm.guest).map_err(|error| format!("at {side:?}: {error}"))?;
    }
    devices(source.as_ref().map(|(vm, ..)| *vm), source_runs, Side::Source)?;
    devices(target.as_ref().map(|(vm, _)| *vm), target_runs, Side::Destination)?;
    // A destination that failed waits for another migration. One that has the guest does not.
    let again = target.as_ref().filter(|_| target_runs == Some(false)).map(|(vm, _)| *vm);
    next_migration(play, owner.map(|(vm, _)| vm), again)
        .map_err(|error| format!("the next migration: {error}"))
}

/// Checks the source's outcome; returns whether the guest runs there.
fn at_source(case: Case, vm: &Staged, outcome: &Outcome, may_run: bool) -> Result<bool, String> {
    let runs = vm.run_state() == RunState::Running;
    let should = match outcome {
        Outcome::Completed => false,
        outcome if is_back(outcome) => true,
        other => return Err(format!("the guest did not come back: {other:?}")),
    };
    if runs != should || may_run != should {
        return Err(format!("after {outcome:?} the source's guest runs: {runs}, may run: {may_run}"));
    }
    let ram = vm.ram();
    let is_left_tracked = case.blow == Blow::Panic && panics::leaves_tracking(case.stop);
    if !is_left_tracked && vm.guest.dirty_source().sync(&mut DirtyBitmaps::new(&ram)).is_ok() {
        return Err(format!("after {outcome:?} the source's writes are still tracked"));
    }
    Ok(runs)
}

/// Checks the destination's outcome; returns whether the guest runs there.
fn at_target(vm: &Staged, arrival: &Arrival) -> Result<bool, String> {
    let runs = vm.run_state() == RunState::Running;
    match arrival {
        Arrival::Completed(RunState::Running) if runs => Ok(true),
        Arrival::Failed(_) if !runs && !vm.guest.has_guest() => forgotten(vm).map(|()| false),
        other => Err(format!("after {other:?} the destination's guest runs: {runs}")),
    }
}

/// Checks that a failed destination has neither the guest's state nor its memory.
pub(crate) fn forgotten(vm: &Staged) -> Judgement {
    if !matches!(vm.guest.cut(), Err(CheckError::NoGuest)) {
        return Err("the destination failed and still has the guest's state".into());
    }
    for block in vm.ram().blocks() {
        let left = block.resident_bytes().map_err(|error| error.to_string())?;
        if left > 0 {
            return Err(format!("the destination failed and keeps {left} bytes of {:?}", block.name()));
        }
    }
    Ok(())
}

/// Checks that devices with large state run where the guest runs. Their state must be complete.
pub(crate) fn devices(vm: Option<&Arc<Staged>>, guest_runs: Option<bool>, side: Side) -> Judgement {
    let (Some(vm), Some(guest_runs)) = (vm, guest_runs) else { return Ok(()) };
    for (number, bank) in vm.banks.iter().enumerate() {
        // The devices of a waiting destination were never stopped, so they may be running.
        let is_right = if guest_runs { bank.runs() } else { side == Side::Destination || !bank.runs() };
        if !is_right {
            return Err(format!("bank {number} at {side:?} runs: {}, its guest: {guest_runs}", bank.runs()));
        }
        if guest_runs && side == Side::Destination && bank.arrived() != Verdict::Good {
            return Err(format!("bank {number} arrived as {:?}", bank.arrived()));
        }
    }
    Ok(())
}

/// Whether the guest must run now: at the source, at the destination. `None` for a side that was killed.
fn expected(play: &Play) -> (Option<bool>, Option<bool>) {
    let stop = play.case.stop;
    // The source gives up the guest only after the destination has read EOF.
    let arrives = match play.case.blow {
        // After the commit, cancel is refused and the migration completes.
        Blow::Cancel => stop.is_committed(),
        Blow::Panic => panics::effect(stop) == panics::Effect::Nothing,
        // At this stop, no connection exists that could be cut.
        Blow::Cut if stop == Stop::Setup => true,
        blow if blow.is_harmless() => !stop.is_undoing(),
        _ => stop.is_handed_over(),
    };
    match play.case.blow {
        Blow::KillSource | Blow::ForkSource => (None, Some(arrives)),
        // The guest died with the destination. If the source received the acknowledgement, it has given up
        // the guest. Otherwise it asks without an answer, and an operator decides.
        Blow::KillDestination => (Some(!stop.is_acknowledged()), None),
        _ => (Some(!arrives), Some(arrives)),
    }
}

/// Checks that the guest runs and its memory is one consistent cut.
pub(crate) fn whole(guest: &ProcessGuest) -> Judgement {
    if !guest.wait_progress(1, Duration::from_secs(60)) {
        return Err("the guest stands still".into());
    }
    guest.pause().map_err(|error| error.to_string())?;
    let verdict = guest.check().map_err(|error| error.to_string())?;
    if !verdict.is_consistent() {
        return Err(verdict.to_string());
    }
    guest.cont().map_err(|error| error.to_string())
}

/// Migrates `owner`'s guest to `again` or to a new place. Without an owner, it migrates a new guest.
fn next_migration(play: &Play, owner: Option<&Arc<Staged>>, again: Option<&Arc<Staged>>) -> Judgement {
    let settings = Settings::new(play.case.seed, play.case.stop).undisturbed();
    let (stage, ledger) = (Arc::new(Stage::default()), Arc::new(Ledger::with_owner(Side::Source)));
    let staged =
        |(guest, banks), side| Staged::new(guest, banks, Arc::clone(&stage), Arc::clone(&ledger), side);
    let source = match owner {
        Some(vm) => (Arc::clone(&vm.guest), vm.banks.clone()),
        None => {
            let guest = ProcessGuest::boot(settings.guest.clone()).map_err(|error| error.to_string())?;
            guest.cont().map_err(|error| error.to_string())?;
            (guest, Bank::all(&settings.banks, true)?)
        }
    };
    let target = match again {
        Some(vm) => (Arc::clone(&vm.guest), vm.banks.clone()),
        None => {
            let guest = ProcessGuest::waiting(settings.guest.clone()).map_err(|error| error.to_string())?;
            (guest, Bank::all(&settings.banks, false)?)
        }
    };
    let (source, target) = (staged(source, Side::Source), staged(target, Side::Destination));
    let incoming = listen(&target, &settings)?;
    let migration = start(&source, &incoming.address(), &settings)?;
    match (migration.wait(), incoming.wait()) {
        (Outcome::Completed, Arrival::Completed(RunState::Running)) => whole(&target.guest)
            .and_then(|()| devices(Some(&source), Some(false), Side::Source))
            .and_then(|()| devices(Some(&target), Some(true), Side::Destination)),
        (outcome, arrival) => Err(format!("source {outcome:?}, destination {arrival:?}")),
    }?;
    let violations = ledger.violations();
    if violations.is_empty() { Ok(()) } else { Err(violations.join("; ")) }
}
