//! The state of a standby, as its monitor reports it.

use serde_json::{Value, json};
use sterna::Address;
use sterna_standby::machines::standby::{Because, Outcome, State};
use sterna_standby::{Standby, StandbyContact, StandbyState, StandbyStatistics};

const HANGS: &str = "no checkpoint has arrived for some intervals, although the primary is in contact: its guest, or \
                     the QEMU that runs it, hangs. The standby keeps the last checkpoint; `age` contains its age";

/// A snapshot of a standby.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StandbyReport {
    /// The address at which it listens.
    pub address: Address,
    /// The state of its stream.
    pub state: StandbyState,
    /// The statistics.
    pub statistics: StandbyStatistics,
    /// The contact with its primary. None if the protection has no contact.
    pub contact: Option<ContactReport>,
    /// Name and identity of the arbiter, as far as known.
    pub arbiter: Option<(String, Option<String>)>,
    /// State of the VM that waits for the guest, in words.
    pub waiting_vm: Option<String>,
}

/// A snapshot of the contact.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ContactReport {
    /// Whether the primary is in contact.
    pub is_connected: bool,
    /// The protection's id, in hexadecimal digits.
    pub id: String,
    /// The generation of the protection.
    pub generation: u64,
    /// Whether the guest is started only after a fence.
    pub needs_fence: bool,
    /// How long the primary may run its guest without an answer from this side.
    pub lease: std::time::Duration,
    /// How long this side waits after the last heartbeat that it echoed.
    pub patience: std::time::Duration,
    /// The state of the contact's state machine.
    pub state: State,
    /// The outcome of the protection, if it has ended.
    pub outcome: Option<Outcome>,
    /// The last failure.
    pub trouble: Option<String>,
}

impl StandbyReport {
    /// The snapshot of `standby`, without the arbiter and the VM.
    pub fn of(standby: &Standby) -> Self {
        Self {
            address: standby.address(),
            state: standby.state(),
            statistics: standby.statistics(),
            contact: standby.contact().as_ref().map(ContactReport::of),
            arbiter: None,
            waiting_vm: None,
        }
    }

    /// The state in one or two words.
    pub fn word(&self) -> &'static str {
        let state = self.contact.as_ref().map(|contact| contact.state);
        match (&self.state, state) {
            (_, Some(State::Preparing)) => "preparing",
            (_, Some(State::Unready)) => "unready",
            (_, Some(State::Claiming)) => "claiming",
            (_, Some(State::Fencing)) => "fencing",
            (_, Some(State::Unfenced)) => "unfenced",
            (_, Some(State::Starting)) => "starting",
            (_, Some(State::Held)) => "not started",
            (StandbyState::TakenOver, _) | (_, Some(State::Running)) => "taken over",
            (StandbyState::Discarded, _) | (_, Some(State::Discarded)) => "discarded",
            (StandbyState::Waiting, _) => "waiting",
            (StandbyState::Seeding, _) => "seeding",
            (StandbyState::Following, _) => "following",
            (StandbyState::Lost(_), _) => "holding",
            _ => "failed",
        }
    }

    /// The reason for a problem, if there is one.
    pub fn trouble(&self) -> Option<String> {
        match &self.state {
            StandbyState::Failed(why) => Some(why.to_string()),
            StandbyState::Lost(why) if self.contact.is_none() => Some(why.to_string()),
            _ => {
                let trouble = self.contact.as_ref().and_then(|contact| contact.trouble.clone());
                trouble.or_else(|| self.hangs().then(|| HANGS.to_owned()))
            }
        }
    }

    /// Whether checkpoints have stopped, although the primary is in contact.
    pub fn hangs(&self) -> bool {
        let is_followed = matches!(self.state, StandbyState::Following)
            && self
                .contact
                .as_ref()
                .is_some_and(|contact| contact.is_connected && contact.state == State::Following);
        is_followed && self.statistics.checkpoints_hang()
    }

    /// All members, as JSON.
    pub fn to_json(&self) -> Value {
        let StandbyStatistics {
            checkpoints,
            age,
            ram_bytes,
            received_bytes,
            normal_pages,
            zero_pages,
            last_took,
            ..
        } = self.statistics;
        json!({
            "state": self.word(),
            "checkpoints": checkpoints,
            "age": age.map(|age| age.as_secs_f64()),
            "ram-bytes": ram_bytes,
            "received-bytes": received_bytes,
            "pages": normal_pages + zero_pages,
            "last-time": last_took.as_secs_f64(),
            "trouble": self.trouble(),
            "contact": self.contact.as_ref().map(ContactReport::to_json),
            "arbiter": self.arbiter.as_ref().map(|(spec, identity)| json!({
                "spec": spec, "identity": identity,
            })),
            "waiting-vm": self.waiting_vm,
        })
    }
}

impl ContactReport {
    fn of(contact: &StandbyContact) -> Self {
        let (protection, terms, now) = (contact.protection(), contact.terms(), contact.state());
        Self {
            is_connected: contact.is_in_contact(),
            id: protection.id.iter().map(|byte| format!("{byte:02x}")).collect(),
            generation: protection.generation,
            needs_fence: contact.needs_fence(),
            lease: terms.lease,
            patience: terms.patience(),
            state: now.state,
            outcome: now.outcome,
            trouble: now.trouble,
        }
    }

    /// The outcome in one word.
    pub fn outcome_word(&self) -> Option<&'static str> {
        self.outcome.map(|outcome| match outcome {
            Outcome::Running(_) => "running",
            Outcome::Discarded(Because::NothingHeld) => "nothing-held",
            Outcome::Discarded(Because::Unprotected) => "unprotected",
            Outcome::Discarded(Because::LocalFailure) => "local-failure",
            Outcome::Discarded(Because::ArbiterOutOfReach) => "arbiter-out-of-reach",
            Outcome::Discarded(Because::ClaimLost) => "claim-lost",
        })
    }

    /// All members, as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "connected": self.is_connected,
            "protection": self.id,
            "generation": self.generation,
            "needs-fence": self.needs_fence,
            "lease": self.lease.as_secs_f64(),
            "patience": self.patience.as_secs_f64(),
            "outcome": self.outcome_word(),
        })
    }
}
