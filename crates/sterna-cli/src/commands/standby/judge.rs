//! The arbiter and the fence of a standby.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna_arbiter::{Claim, CommandLine, DEFAULT_LIMIT, Fence, Opened, Role, Spec};
use sterna_standby::machines::Ruling;
use sterna_standby::{ArbiterIdentity, ArbiterStore, Claims, ContactRules, Protection, Secret};

use super::arguments::Arguments;
use crate::exit::Stop;
use crate::{claims, secret};

/// Decides whether the guest may run here.
pub struct Judge {
    spec: String,
    opened: Opened,
    fence: Option<Fence>,
    /// The operator has vouched that the primary's guest does not run.
    is_vouched: AtomicBool,
    /// The operator has decided in place of an arbiter that never answers.
    is_without_arbiter: AtomicBool,
    /// The identity of the arbiter's store, after the arbiter was asked.
    identity: Mutex<Option<String>>,
}

impl Judge {
    /// Opens the arbiter and the fence of the command line. Without an arbiter, the operator decides.
    pub fn open(arguments: &Arguments) -> Result<Arc<Self>, Stop> {
        let text = arguments.arbiter.as_deref().unwrap_or("ask");
        let spec: Spec = text.parse().map_err(|error| Stop::usage(format!("--arbiter: {error}")))?;
        let opened =
            spec.open(DEFAULT_LIMIT).map_err(|error| Stop::unreadable(format!("--arbiter: {error}")))?;
        let line = arguments.fence.as_deref().map(str::parse::<CommandLine>).transpose();
        let line = line.map_err(|error| Stop::usage(format!("--fence: {error}")))?;
        let fence = line.map(|line| Fence::new(line, arguments.fence_limit));
        let (is_vouched, is_without_arbiter, identity) = Default::default();
        Ok(Arc::new(Self { spec: spec.to_string(), opened, fence, is_vouched, is_without_arbiter, identity }))
    }

    /// The rules for a contact: its secret, its times, the claim and the fence.
    pub fn rules(self: &Arc<Self>, arguments: &Arguments) -> Result<ContactRules, Stop> {
        let secret = match &arguments.secret {
            Some(path) => secret::read(path)?,
            None => Secret::from_bytes([0; 32]),
        };
        let (asked, fenced) = (Arc::clone(self), Arc::clone(self));
        Ok(ContactRules {
            secret,
            is_required: arguments.is_protected(),
            claims: Arc::new(move |protection| asked.claims(protection)),
            fence: Arc::new(move |protection| fenced.run_fence(protection)),
            always_fences: self.fence.is_some(),
        })
    }

    fn claims(self: &Arc<Self>, protection: Protection) -> Arc<dyn Claims> {
        let claims = claims::claims(&self.spec, &self.opened.arbiter, Role::Standby, protection);
        Arc::new(NotedClaims { claims, judge: Arc::clone(self) })
    }

    fn run_fence(&self, protection: Protection) -> Result<(), String> {
        match &self.fence {
            Some(fence) => fence.run(&claim(protection)).map_err(|error| error.to_string()),
            None if self.is_vouched.load(Ordering::Acquire) => Ok(()),
            None => Err("this standby has no --fence".to_owned()),
        }
    }

    /// The arbiter's address, and the identity of its store.
    pub fn arbiter(&self) -> (String, Option<String>) {
        (self.spec.clone(), self.identity.lock().clone())
    }

    /// Whether a command makes sure that the primary's guest does not run.
    pub fn has_fence(&self) -> bool {
        self.fence.is_some()
    }

    /// Whether an operator is the arbiter.
    pub fn is_operator(&self) -> bool {
        self.opened.operator.is_some()
    }

    /// Whether the decision of an operator, who is the arbiter, is enough for an unplanned takeover.
    /// The end of its lease does not stop a QEMU. Therefore a fence, or the operator, must make sure that its
    /// guest does not run.
    ///
    /// # Errors
    /// What the operator must add. Nothing was decided.
    pub fn check_word(&self, needs_fence: bool, vouches: bool) -> Result<(), String> {
        check_word(needs_fence, self.fence.is_some(), vouches)
    }

    /// Gives the claim to this side, on behalf of the operator, who is the arbiter.
    pub fn decide(&self, protection: Protection) -> Result<(), String> {
        match &self.opened.operator {
            Some(operator) => {
                operator.decide_claim(&claim(protection), true).map_err(|error| error.to_string())
            }
            None => Ok(()),
        }
    }

    /// Lets the operator's decision win the next claim that the arbiter does not answer.
    /// An answer of the arbiter takes precedence.
    pub fn go_without_arbiter(&self) {
        self.is_without_arbiter.store(true, Ordering::Release);
    }

    /// Records the operator's assurance that the primary's guest does not run.
    pub fn vouch(&self) {
        self.is_vouched.store(true, Ordering::Release);
    }
}

fn check_word(needs_fence: bool, has_fence: bool, vouches: bool) -> Result<(), String> {
    if !needs_fence || has_fence || vouches {
        return Ok(());
    }
    Err("the primary cannot stop its guest by itself, and this standby has no --fence. Nothing was decided: make sure \
         that the primary's guest does not run and never will, then run the command again with --vouch"
        .to_owned())
}

/// The standby's claim of the protection's generation.
fn claim(protection: Protection) -> Claim {
    claims::claim(Role::Standby, protection)
}

/// Claims that store the identity of the arbiter's store in the judge.
struct NotedClaims {
    claims: Arc<dyn Claims>,
    judge: Arc<Judge>,
}

impl Claims for NotedClaims {
    fn claim(&self) -> Result<Ruling, String> {
        match self.claims.claim() {
            Err(_) if self.judge.is_without_arbiter.load(Ordering::Acquire) => Ok(Ruling::Won),
            ruled => ruled,
        }
    }

    fn look(&self) -> Result<(), String> {
        self.claims.look()
    }

    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        let found = self.claims.arbiter();
        *self.judge.identity.lock() = Some(match &found {
            Ok(ArbiterIdentity { store: ArbiterStore::Token(token), .. }) => token.clone(),
            Ok(_) => "unknown".to_owned(),
            Err(error) => format!("out of reach: {error}"),
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_word_needs_a_fence_or_a_voucher_for_a_primary_that_does_not_stop_by_itself() {
        for (needs_fence, has_fence, vouches, is_enough) in [
            (true, false, false, false),
            (true, true, false, true),
            (true, false, true, true),
            (false, false, false, true),
        ] {
            let checked = check_word(needs_fence, has_fence, vouches);
            assert_eq!(checked.is_ok(), is_enough, "{needs_fence} {has_fence} {vouches}");
            assert!(checked.err().is_none_or(|why| why.contains("--vouch")));
        }
    }

    struct Says(Result<Ruling, String>);

    impl Claims for Says {
        fn claim(&self) -> Result<Ruling, String> {
            self.0.clone()
        }
    }

    fn judge() -> Arc<Judge> {
        let spec: Spec = "ask".parse().expect("a spec");
        let opened = spec.open(DEFAULT_LIMIT).expect("it needs nothing");
        let (is_vouched, is_without_arbiter, identity) = Default::default();
        Arc::new(Judge {
            spec: "ask".to_owned(),
            opened,
            fence: None,
            is_vouched,
            is_without_arbiter,
            identity,
        })
    }

    #[test]
    fn operators_last_resort_counts_only_where_the_arbiter_does_not_answer() {
        let away = || Err("nobody answers".to_owned());
        for (says, goes_without, expected) in [
            (away(), false, away()),
            (away(), true, Ok(Ruling::Won)),
            // The claim was given to the primary. The operator's decision does not take it back.
            (Ok(Ruling::Lost), true, Ok(Ruling::Lost)),
        ] {
            let judge = judge();
            if goes_without {
                judge.go_without_arbiter();
            }
            let claims = NotedClaims { claims: Arc::new(Says(says)), judge };
            assert_eq!(claims.claim(), expected);
        }
    }
}
