//! Properties that every case must have, whatever its disturbances.

use sterna::ram::DirtyBitmaps;
use sterna::{Arrival, Outcome, RunState, SourceVm, Vm};

use super::case::Case;
use super::side::{Here, There};
use super::trouble::{Order, What};
use crate::judge::{devices, forgotten, whole};
use crate::outages::cable::Cable;
use crate::stop::Side;

/// The guest's location, seen from one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// The guest runs on this side, and every page is right.
    Runs,
    /// The guest does not run on this side and never will.
    Gone,
    /// Not decided. A source does not run the guest; a destination runs it until it needs a missing page.
    Waits,
}

impl At {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Gone => "gone",
            Self::Waits => "waits",
        }
    }

    pub(super) fn of_label(label: &str) -> Option<Self> {
        [Self::Runs, Self::Gone, Self::Waits].into_iter().find(|at| at.label() == label)
    }
}

/// Checks the source and returns the guest's location from its view.
pub(super) fn at_source(here: &Here) -> Result<At, String> {
    let (outcome, runs) = (here.migration.outcome(), here.vm.run_state() == RunState::Running);
    let at = match &outcome {
        None => At::Waits,
        Some(Outcome::Completed) => At::Gone,
        Some(Outcome::Cancelled | Outcome::Failed { held: false, .. }) => At::Runs,
        Some(other) => return Err(format!("the guest did not come back: {other:?}")),
    };
    let may_run = here.migration.may_guest_run();
    if runs != (at == At::Runs) || may_run != runs {
        return Err(format!("after {outcome:?} the source's guest runs: {runs}, may run: {may_run}"));
    }
    if at == At::Waits {
        return Ok(at);
    }
    if here.vm.guest.dirty_source().sync(&mut DirtyBitmaps::new(&here.vm.ram())).is_ok() {
        return Err(format!("after {outcome:?} the source's writes are still tracked"));
    }
    if runs {
        whole(&here.vm.guest).map_err(|error| format!("at the source: {error}"))?;
    }
    devices(Some(&here.vm), Some(runs), Side::Source)?;
    Ok(at)
}

/// Checks the destination and returns the guest's location from its view.
pub(super) fn at_destination(there: &There) -> Result<At, String> {
    let (arrival, runs) = (there.incoming.arrival(), there.vm.run_state() == RunState::Running);
    let missing = there.incoming.statistics().postcopy.map_or(0, |postcopy| postcopy.missing_pages);
    let at = match &arrival {
        Some(Arrival::Completed(RunState::Running)) if runs && missing == 0 => {
            whole(&there.vm.guest).map_err(|error| format!("at the destination: {error}"))?;
            At::Runs
        }
        Some(Arrival::Failed(_)) if !runs && !there.vm.guest.has_guest() => {
            forgotten(&there.vm)?;
            At::Gone
        }
        None if runs && missing > 0 => {
            if there.incoming.cancel().is_ok() {
                return Err("a guest that runs and lacks pages was given up".into());
            }
            return Ok(At::Waits);
        }
        other => {
            return Err(format!(
                "after {other:?} the destination's guest runs: {runs}, it lacks {missing} pages, {}",
                there.incoming.status()
            ));
        }
    };
    devices(Some(&there.vm), Some(at == At::Runs), Side::Destination)?;
    Ok(at)
}

/// Whether a case may end with the guest at its source.
pub(super) fn may_fail(case: &Case, cable: &Cable) -> bool {
    let struck = cable.struck();
    let is_given_up = |what| matches!(what, What::Order(Order::Cancel | Order::Abandon) | What::Kill(_));
    if struck.iter().any(|struck| is_given_up(struck.what)) {
        return true;
    }
    let has_committed = cable.has_told(Side::Source, "committed");
    struck.iter().filter(|struck| matches!(struck.what, What::Cut(..))).any(|struck| {
        // The window is too short or zero, or the sides had not agreed on it yet.
        !case.reconnects() || !struck.has_begun
            // The answer to the commit may have been lost.
            || has_committed
            // The switch to postcopy is tried only once.
            || (case.is_postcopy() && cable.may_meet_switch(struck))
    })
}
