//! `ask`: an operator decides.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Generation, GuestName};
use crate::error::ClaimError;

/// The operator's side: which claim waits, and the decision.
///
/// Each side of a protection has its own. Whoever decides must not let both win.
#[derive(Debug, Clone, Default)]
pub struct Operator(Arc<Mutex<State>>);

/// An operator's decision could not be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotDecided {
    /// No claim waits.
    #[error(
        "no claim waits for a decision: this side has not lost the other one, or the claim was decided before"
    )]
    NothingWaits,
    /// The claim was decided otherwise, which is final.
    #[error(
        "this claim was decided otherwise before, and a decision is final: protect the guest again for a new one"
    )]
    DecidedOtherwise,
}

#[derive(Debug, Default)]
struct State {
    waiting: Option<Claim>,
    /// A claim's decision is never changed.
    decided: Vec<(Claim, bool)>,
}

/// Waits for its operator.
#[derive(Debug)]
pub(crate) struct Ask(pub(crate) Operator);

impl Operator {
    /// The claim that waits, if one does: the one that was asked for last.
    pub fn waiting(&self) -> Option<Claim> {
        self.0.lock().waiting.clone()
    }

    /// Decides the claim that waits: whether it has won. The decision is final.
    ///
    /// # Errors
    /// No claim waits.
    pub fn decide(&self, won: bool) -> Result<Claim, NotDecided> {
        let waiting = self.waiting().ok_or(NotDecided::NothingWaits)?;
        self.decide_claim(&waiting, won)?;
        Ok(waiting)
    }

    /// Decides a claim, whether it waits already or not. The decision is final.
    ///
    /// # Errors
    /// The claim was decided otherwise.
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
    /// Does not wait: the caller asks again.
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
                    "make sure that only one side runs the guest, then tell that side that it has won and the other that \
                     it has lost",
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
