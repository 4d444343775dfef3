//! The next step of a survivor: it is migrated or protected again.

use std::sync::Arc;

use sterna::{Arrival, Capabilities, Incoming, Migration, Outcome, RunState, SourceVm, TargetVm};
use sterna_guests::ProcessGuest;
use sterna_standby::machines::{primary, standby};
use sterna_standby::{EpochGate, Standby};

use super::LONGEST;
use super::case::Case;
use super::play::{Play, until};
use super::vm::{Plans, Troubled};
use crate::judge::whole;

impl Case {
    /// Moves the guest to the place that has lost, or to a new one.
    pub(super) fn next(
        &self,
        guest: &Arc<ProcessGuest>,
        place: Option<&Arc<ProcessGuest>>,
    ) -> Result<(), String> {
        let place = match place {
            Some(place) => Arc::clone(place),
            None => ProcessGuest::waiting(self.guest.clone()).map_err(|error| error.to_string())?,
        };
        let again = self.undisturbed();
        if self.protects_again {
            again.protect_and_hand_over(guest, &place)
        } else {
            again.migrate(guest, &place)
        }?;
        whole(&place)
    }

    fn protect_and_hand_over(
        &self,
        guest: &Arc<ProcessGuest>,
        place: &Arc<ProcessGuest>,
    ) -> Result<(), String> {
        let play = self.protect(guest, place)?;
        until(|| play.primary.state().outcome.is_some() || play.primary.statistics().held >= 3)?;
        play.hand_over()
    }

    fn migrate(&self, guest: &Arc<ProcessGuest>, place: &Arc<ProcessGuest>) -> Result<(), String> {
        let plans = Arc::<Plans>::default();
        let (params, capabilities) = self.settings();
        // `xbzrle` in a case applies only to checkpoints, and not to this migration.
        let capabilities = Capabilities { xbzrle: false, ..capabilities };
        let at = "tcp:127.0.0.1:0".parse().map_err(|error| format!("an address: {error}"))?;
        let target = Troubled::new(place, &plans) as Arc<dyn TargetVm>;
        let incoming = Incoming::listen(target, &at, params.clone(), capabilities, Arc::new(()))
            .map_err(|error| error.to_string())?;
        let source = Troubled::new(guest, &plans) as Arc<dyn SourceVm>;
        let migration = Migration::start(source, &incoming.address(), params, capabilities, Arc::new(()))
            .map_err(|error| error.to_string())?;
        match (migration.wait(), incoming.wait()) {
            (Outcome::Completed, Arrival::Completed(RunState::Running)) => Ok(()),
            ends => Err(format!("{ends:?}")),
        }
    }
}

impl Play {
    /// Hands the guest over as planned, and waits for both ends.
    pub(super) fn hand_over(&self) -> Result<(), String> {
        self.primary.hand_over().map_err(|refusal| format!("{refusal}: {:?}", self.primary.state()))?;
        until(|| self.primary.state().outcome.is_some())?;
        let here = self.primary.wait();
        let there = self.standby.as_ref().and_then(Standby::contact);
        let there = there.and_then(|contact| contact.wait(LONGEST));
        match (here, there) {
            (primary::Outcome::HandedOver, Some(standby::Outcome::Running(_))) => {}
            ends => return Err(format!("{ends:?}: {:?}", self.primary.state())),
        }
        // Output that still waits in the gate is not needed any more.
        self.here_says.gate.drop_output();
        Ok(())
    }
}
