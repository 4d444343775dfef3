//! The arbiter `ask`: an operator decides each claim.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Generation, GuestName};
use crate::error::ClaimError;

/// The operator's interface to the arbiter `ask`: shows the waiting claim and takes the decision.
///
/// Each side of a protection has its own `Operator`. The operator must not let both sides win.
#[derive(Debug, Clone, Default)]
pub struct Operator(Arc<Mutex<State>>);

/// The reason why an operator's decision was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotDecided {
    /// No claim waits for a decision.
    #[error(
        "no claim waits for a decision: this side has not lost the other one, or the claim was decided before"
    )]
    NothingWaits,
    /// The claim already has the opposite decision. A decision is final.
    #[error(
        "this claim already has another decision, which is final: protect the guest again for a new claim"
    )]
    DecidedOtherwise,
}

#[derive(Debug, Default)]
struct State {
    waiting: Option<Claim>,
    /// One entry for each decided claim, with `true` for won. Entries never change.
    decided: Vec<(Claim, bool)>,
}

/// The arbiter `ask`: gives no ruling until its operator has decided.
#[derive(Debug)]
pub(crate) struct Ask(pub(crate) Operator);

impl Operator {
    /// Returns the claim that waits for a decision; if there were several, the latest one.
    pub fn waiting(&self) -> Option<Claim> {
        self.0.lock().waiting.clone()
    }

    /// Decides the waiting claim; `won` tells whether it has won. The decision is final.
    ///
    /// # Errors
    /// No claim waits.
    pub fn decide(&self, won: bool) -> Result<Claim, NotDecided> {
        let waiting = self.waiting().ok_or(NotDecided::NothingWaits)?;
        self.decide_claim(&waiting, won)?;
        Ok(waiting)
    }

    /// Decides `claim`, also before the arbiter has received it. The decision is final.
    ///
    /// # Errors
    /// The claim already has the opposite decision.
    pub fn decide_claim(&self, claim: &Claim, won: bool) -> Result<(), NotDecided> {
        let mut state = self.0.lock();
        match state.decision(claim) {
            Some(before) if before != won => return Err(NotDecided::DecidedOtherwise),
            Some(_) => {}
            None => state.decided.push((claim.clone(), won)),
        }
        if state.waiting.as_ref() == Some(claim) {
            state.waiting = None;
        }
        Ok(())
    }
}

impl State {
    fn decision(&self, claim: &Claim) -> Option<bool> {
        self.decided.iter().find(|(decided, _)| decided == claim).map(|(_, won)| *won)
    }
}

impl Arbiter for Ask {
    /// Returns immediately, also without a decision: the caller repeats the call.
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError> {
        let mut state = self.0.0.lock();
        match state.decision(claim) {
            Some(true) => Ok(Ruling::Won),
            Some(false) => Ok(Ruling::Lost { winner: None }),
            None => {
                state.waiting = Some(claim.clone());
                Err(ClaimError::unreachable(
                    "the arbiter ask",
                    "no operator has decided yet",
                    "make sure that only one side runs the guest, then decide on that side that it has won, and on \
                     the other side that it has lost",
                ))
            }
        }
    }

    fn identity(&self, _: &GuestName, _: Generation) -> Result<Identity, ClaimError> {
        Ok(Identity::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::{Claimant, Role};

    fn claim(generation: u64) -> Claim {
        Claim {
            guest: GuestName::new("guest").expect("a name"),
            generation: Generation::new(generation),
            claimant: Claimant::of_this_process(Role::Primary),
        }
    }

    #[test]
    fn claim_waits_until_its_operator_decides() {
        let operator = Operator::default();
        let ask = Ask(operator.clone());

        for won in [true, false] {
            let claim = claim(u64::from(won));
            assert_eq!(operator.waiting(), None);
            assert_eq!(operator.decide(won), Err(NotDecided::NothingWaits));
            let error = ask.claim(&claim).expect_err("nobody has decided");
            assert!(error.to_string().contains("no operator has decided yet"), "{error}");
            assert_eq!(operator.waiting(), Some(claim.clone()));

            assert_eq!(operator.decide(won), Ok(claim.clone()));

            let expected = if won { Ruling::Won } else { Ruling::Lost { winner: None } };
            assert_eq!((ask.claim(&claim), ask.claim(&claim)), (Ok(expected.clone()), Ok(expected)));
        }
    }

    #[test]
    fn decision_is_final_and_for_its_generation_alone() {
        let operator = Operator::default();
        let ask = Ask(operator.clone());
        operator.decide_claim(&claim(1), false).expect("decided");

        assert_eq!(operator.decide_claim(&claim(1), true), Err(NotDecided::DecidedOtherwise));
        assert_eq!(operator.decide_claim(&claim(1), false), Ok(()));
        assert_eq!(ask.claim(&claim(1)), Ok(Ruling::Lost { winner: None }));
        ask.claim(&claim(2)).expect_err("another generation");
    }
}
