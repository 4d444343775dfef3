//! The arbiter and the fence.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna::replica::machines::Ruling;
use sterna::replica::{ArbiterIdentity, ArbiterStore, Claims, ContactRules, Protection, Secret};
use sterna_arbiter::{Claim, CommandLine, DEFAULT_LIMIT, Fence, Opened, Role, Spec};

use super::Arguments;
use crate::exit::Stop;
use crate::{claims, secret};

/// Decides whether the guest may run here.
pub struct Judge {
    spec: String,
    opened: Opened,
    fence: Option<Fence>,
    /// The operator has said that the primary's guest does not run.
    is_vouched: AtomicBool,
    /// What was found at the arbiter, once it was asked.
    identity: Mutex<Option<String>>,
}

impl Judge {
    /// What the command line says; by default an operator decides.
    pub fn open(arguments: &Arguments) -> Result<Arc<Self>, Stop> {
        let text = arguments.arbiter.as_deref().unwrap_or("ask");
        let spec: Spec = text.parse().map_err(|error| Stop::usage(format!("--arbiter: {error}")))?;
        let opened =
            spec.open(DEFAULT_LIMIT).map_err(|error| Stop::unreadable(format!("--arbiter: {error}")))?;
        let line = arguments.fence.as_deref().map(str::parse::<CommandLine>).transpose();
        let line = line.map_err(|error| Stop::usage(format!("--fence: {error}")))?;
        let fence = line.map(|line| Fence::new(line, arguments.fence_limit));
        let (is_vouched, identity) = Default::default();
        Ok(Arc::new(Self { spec: spec.to_string(), opened, fence, is_vouched, identity }))
    }

    /// Who may be in contact, and what decides.
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
            None => Err("there is no --fence: see to it that the primary's guest does not run and never will, then say so \
                         with `sterna takeover --vouch`"
                .to_owned()),
        }
    }

    /// The arbiter, and what was found there.
    pub fn arbiter(&self) -> (String, Option<String>) {
        (self.spec.clone(), self.identity.lock().clone())
    }

    /// Whether an operator is the arbiter.
    pub fn is_operator(&self) -> bool {
        self.opened.operator.is_some()
    }

    /// The operator, who is the arbiter, gives the claim to this side.
    pub fn decide(&self, protection: Protection) -> Result<(), String> {
        match &self.opened.operator {
            Some(operator) => {
                operator.decide_claim(&claim(protection), true).map_err(|error| error.to_string())
            }
            None => Ok(()),
        }
    }

    /// The operator vouches that the primary's guest does not run.
    pub fn vouch(&self) {
        self.is_vouched.store(true, Ordering::Release);
    }
}

/// This side's claim.
fn claim(protection: Protection) -> Claim {
    claims::claim(Role::Standby, protection)
}

/// Notes what was found at the arbiter.
struct NotedClaims {
    claims: Arc<dyn Claims>,
    judge: Arc<Judge>,
}

impl Claims for NotedClaims {
    fn claim(&self) -> Result<Ruling, String> {
        self.claims.claim()
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
