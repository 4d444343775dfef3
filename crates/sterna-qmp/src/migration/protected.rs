//! Implements the monitor's interface with the engine's two sides of a protection.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use sterna::{Address, IncomingStatistics, Migration, Parameters, Recording, Statistics, Status};
use sterna_standby::machines::{primary, standby};
use sterna_standby::{
    CheckpointCopy, CheckpointMode, ContactRules, Primary, Standby, StandbyContact, StandbyState,
    checkpoints_hang,
};

use super::colo;
use super::engine::{GuestAt, Outgoing, Receiving};
use super::protection::{Decide, Protection, ProtectionEnd, ProtectionMeans, Side};
use crate::standby::StandbyReport;

/// Interval at which a standby checks whether its primary is in contact.
const LOOK: Duration = Duration::from_millis(100);

/// A protected guest, with the operator's decision function, the generation, and whether a watchdog guards its lease.
pub(super) struct ProtectedGuest(
    pub(super) Primary,
    pub(super) Option<Decide>,
    pub(super) u64,
    pub(super) bool,
);

impl ProtectedGuest {
    /// A sentence for the operator if checkpoints have stopped.
    fn hang(&self) -> Option<String> {
        let is_protected = self.0.state().state == primary::State::Protected;
        let (age, interval) = (self.0.held_for()?, self.0.statistics().interval);
        (is_protected && checkpoints_hang(age, interval)).then(|| {
            "the standby has stored no checkpoint for some intervals, although it is in contact: see \
             'checkpoint-age'. The guest's output waits. Either the standby does not read, or the guest cannot be \
             stopped"
                .to_owned()
        })
    }
}

/// A VM that is the standby of another VM's guest.
pub(super) struct StandbyVm {
    standby: Standby,
    decide: Option<Decide>,
    /// If an operator is the arbiter: the requested takeover, until a claim waits for it.
    wished: Mutex<Option<Wish>>,
}

/// A takeover that an operator has requested.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// The primary hands its guest over.
    Planned,
    /// The operator states that the primary's guest does not run.
    Unplanned,
}

impl StandbyVm {
    pub(super) fn new(standby: Standby, decide: Option<Decide>) -> Self {
        Self { standby, decide, wished: Mutex::default() }
    }

    /// Decides a waiting claim by the operator's request. After a planned request, the guest must have been handed
    /// over: otherwise it still belongs to the primary.
    fn look_at_wish(&self, contact: &StandbyContact) {
        let Some(wish) = *self.wished.lock() else { return };
        let is_due = contact.state().state == standby::State::Claiming
            && (wish == Wish::Unplanned || contact.is_given());
        if is_due && colo::decide(self.decide.as_ref(), true).is_ok() {
            *self.wished.lock() = None;
        }
    }
}

/// The rules of a standby's contact.
pub(super) fn rules(means: &ProtectionMeans) -> ContactRules {
    let claims = Arc::clone(&means.claims);
    ContactRules {
        secret: means.secret.clone(),
        is_required: true,
        claims: Arc::new(move |protection| claims(Side::Standby, protection)),
        fence: Arc::new(|_| {
            Err("this standby has no fence, and its primary cannot stop its guest by itself: use `sterna standby --fence`".to_owned())
        }),
        always_fences: false,
    }
}

impl Outgoing for ProtectedGuest {
    fn status(&self) -> Status {
        let ended = self.0.state().outcome.map(|outcome| match outcome {
            primary::Outcome::Failed(_) => Status::Failed,
            _ => Status::Completed,
        });
        // The guest becomes free only when the migration has ended, too.
        match (self.0.migration().status(), ended) {
            (status, Some(ended)) if status.is_terminal() => ended,
            (status, None) if status.is_terminal() => Status::Failing,
            (status, _) => status,
        }
    }

    fn statistics(&self) -> Statistics {
        let trouble = self.0.state().trouble;
        let statistics = self.0.migration().statistics();
        let status = self.status();
        let error = statistics.error.or(trouble).filter(|_| status == Status::Failed);
        Statistics { status, error, ..statistics }
    }

    fn recording(&self) -> Option<Recording> {
        self.0.migration().recording()
    }

    fn cancel(&self) -> Result<(), String> {
        Migration::cancel(self.0.migration()).map_err(|refusal| refusal.to_string())
    }

    fn continue_switchover(&self) -> Result<(), String> {
        Err("a protection has no switchover".to_owned())
    }

    fn set_live(&self, parameters: &Parameters) {
        // Only live settings are applied, and these are never refused.
        let _ = self.0.migration().set_live(|running| running.take_live(parameters));
    }

    fn retry(&self) -> Result<(), String> {
        Migration::retry(self.0.migration()).map_err(|refusal| refusal.to_string())
    }

    fn decide(&self, _: GuestAt, _: Option<Status>) -> Result<(), String> {
        Err("the arbiter decides who runs a protected guest".to_owned())
    }

    fn protection(&self) -> Option<&dyn Protection> {
        Some(self)
    }
}

impl Protection for ProtectedGuest {
    fn mode(&self) -> Option<&'static str> {
        let is_seeded = self.0.migration().status() == Status::Colo;
        (is_seeded && self.0.state().outcome.is_none()).then_some("primary")
    }

    fn report(&self) -> Value {
        let (state, counts) = (self.0.state(), self.0.statistics());
        let seconds = |time: Duration| time.as_secs_f64();
        json!({
            "side": "primary",
            "generation": self.2,
            "state": primary_word(state.state),
            "checkpoints": counts.taken,
            "held": counts.held,
            "pages": counts.pages,
            "last-pages": counts.last_pages,
            "device-bytes": counts.device_bytes,
            "unbuffered": counts.unbuffered,
            "copied-ahead": counts.copied_ahead,
            "copied-on-write": counts.copied_on_write,
            "held-writes": counts.held_writes,
            "why-copied": self.0.why_copied(),
            "checkpoints-in-flight": counts.taken.saturating_sub(counts.held),
            "checkpoint-interval": seconds(counts.interval),
            "xbzrle-pages": counts.xbzrle.pages,
            "xbzrle-bytes": counts.xbzrle.bytes,
            "pause-p50": seconds(counts.pause_p50),
            "pause-p99": seconds(counts.pause_p99),
            "pause-most": seconds(counts.pause_most),
            "pause-last": seconds(counts.pause_last),
            "last-transfer": seconds(counts.last_transfer),
            "output-waiting-bytes": counts.output.waiting_bytes,
            "output-delay": seconds(counts.output.last_delay),
            "output-released": counts.output.released,
            "output-delay-p50": seconds(counts.output.delay_p50),
            "output-delay-p99": seconds(counts.output.delay_p99),
            "transferred-bytes": self.0.migration().statistics().transferred_bytes,
            "outcome": state.outcome.map(|outcome| outcome_word(&outcome)),
            "alone-by": state.outcome.and_then(|outcome| alone_by(&outcome)),
            "checkpoint-age": self.0.held_for().map(seconds),
            "watchdog": self.3,
            "trouble": state.trouble.or_else(|| self.hang()),
        })
    }

    fn generation(&self) -> u64 {
        self.2
    }

    fn may_guest_run(&self) -> bool {
        self.0.may_guest_run()
    }

    fn unprotect(&self) -> Result<(), String> {
        self.0.unprotect().map_err(|refusal| refusal.to_string())
    }

    fn take_over(&self, is_planned: bool) -> Result<(), String> {
        if !is_planned {
            return Err(
                "the guest runs here: run an unplanned takeover at the standby, or set \"planned\" to true"
                    .to_owned(),
            );
        }
        self.0.hand_over().map_err(|refusal| refusal.to_string())
    }

    fn decide(&self, is_at_primary: bool) -> Result<(), String> {
        colo::decide(self.1.as_ref(), is_at_primary)
    }

    fn set_delay(&self, delay: Duration) {
        // The parameter table refuses delays that are too short.
        let _ = self.0.set_checkpoint_delay(delay);
    }

    fn set_mode(&self, mode: CheckpointMode) {
        self.0.set_checkpoint_mode(mode);
    }

    fn set_copy(&self, way: CheckpointCopy) {
        self.0.set_checkpoint_copy(way);
    }

    fn set_in_flight(&self, in_flight: u8) {
        // The parameter table refuses other numbers.
        let _ = self.0.set_checkpoints_in_flight(in_flight);
    }

    fn wait(&self) -> ProtectionEnd {
        match self.0.wait() {
            primary::Outcome::Alone(because) => {
                ProtectionEnd::Here { is_wanted: because == primary::Because::Never }
            }
            primary::Outcome::HandedOver => ProtectionEnd::There { is_planned: true },
            primary::Outcome::Lost => ProtectionEnd::There { is_planned: false },
            primary::Outcome::Failed(_) => ProtectionEnd::Failed,
        }
    }
}

impl Receiving for StandbyVm {
    fn address(&self) -> Address {
        self.standby.address()
    }

    fn status(&self) -> Status {
        match self.standby.state() {
            StandbyState::Waiting => Status::Setup,
            StandbyState::Seeding => Status::Active,
            StandbyState::TakenOver => Status::Completed,
            StandbyState::Failed(_) | StandbyState::Discarded => Status::Failed,
            _ => Status::Colo,
        }
    }

    fn statistics(&self) -> IncomingStatistics {
        let counts = self.standby.statistics();
        IncomingStatistics {
            status: self.status(),
            error: match self.standby.state() {
                StandbyState::Failed(why) => Some(why.to_string()),
                StandbyState::Discarded => {
                    Some("the protection ended, and the guest is at its primary".to_owned())
                }
                _ => None,
            },
            received_bytes: counts.received_bytes,
            normal_pages: counts.normal_pages,
            zero_pages: counts.zero_pages,
            cleared_pages: 0,
            streams: Vec::new(),
            rdma: None,
            postcopy: None,
        }
    }

    fn cancel(&self, _: bool) -> Result<(), String> {
        self.standby.cancel().map_err(|refusal| refusal.to_string())
    }

    fn set_autostart(&self, _: bool) -> bool {
        // The guest always continues in the run state that it had at its primary.
        true
    }

    fn release(&self) -> Result<(), String> {
        Err("the guest runs at its primary: use 'x-sterna-takeover'".to_owned())
    }

    fn protection(&self) -> Option<&dyn Protection> {
        Some(self)
    }
}

impl Protection for StandbyVm {
    fn mode(&self) -> Option<&'static str> {
        matches!(self.standby.state(), StandbyState::Following | StandbyState::Lost(_)).then_some("secondary")
    }

    fn report(&self) -> Value {
        let mut report = StandbyReport::of(&self.standby).to_json();
        report["side"] = "secondary".into();
        report
    }

    fn generation(&self) -> u64 {
        self.standby.contact().map_or(0, |contact| contact.protection().generation)
    }

    fn unprotect(&self) -> Result<(), String> {
        Err("only the primary can end a protection: use 'x-sterna-unprotect' there".to_owned())
    }

    fn take_over(&self, is_planned: bool) -> Result<(), String> {
        let contact = self.standby.contact().ok_or("no primary is or was in contact")?;
        let state = contact.state().state;
        let is_failed =
            matches!(state, standby::State::Unready | standby::State::Unfenced | standby::State::Held);
        // If a step has failed, the operator's command repeats it.
        if is_failed {
            return contact.retry().map_err(|refusal| refusal.to_string());
        }
        if state != standby::State::Claiming || is_planned || self.decide.is_none() {
            contact.take_over(is_planned).map_err(|refusal| refusal.to_string())?;
        }
        if self.decide.is_some() {
            *self.wished.lock() = Some(if is_planned { Wish::Planned } else { Wish::Unplanned });
        }
        Ok(())
    }

    fn decide(&self, is_at_primary: bool) -> Result<(), String> {
        colo::decide(self.decide.as_ref(), !is_at_primary)
    }

    fn set_delay(&self, _: Duration) {}

    fn set_mode(&self, _: CheckpointMode) {}

    fn set_copy(&self, _: CheckpointCopy) {}

    fn set_in_flight(&self, _: u8) {}

    fn wait(&self) -> ProtectionEnd {
        loop {
            match self.standby.state() {
                StandbyState::Failed(_) => return ProtectionEnd::Failed,
                StandbyState::TakenOver | StandbyState::Discarded => break,
                _ => {}
            }
            match self.standby.contact() {
                Some(contact) if contact.wait(LOOK).is_some() => break,
                Some(contact) => self.look_at_wish(&contact),
                None => std::thread::sleep(LOOK),
            }
        }
        match self.standby.contact().and_then(|contact| contact.state().outcome) {
            Some(standby::Outcome::Running(_)) => ProtectionEnd::Here { is_wanted: true },
            _ => ProtectionEnd::There { is_planned: false },
        }
    }
}

fn primary_word(state: primary::State) -> &'static str {
    match state {
        primary::State::Seeding => "seeding",
        primary::State::Protected => "protected",
        primary::State::Ending => "ending",
        primary::State::HandingOver | primary::State::Given => "handing over",
        primary::State::Asking => "asking the arbiter",
        primary::State::Alone => "alone",
        primary::State::HandedOver => "handed over",
        primary::State::Lost => "lost",
        primary::State::Failed => "failed",
    }
}

/// The authority by which the guest may run here unprotected.
fn alone_by(outcome: &primary::Outcome) -> Option<&'static str> {
    match outcome {
        primary::Outcome::Alone(primary::Because::Never) => Some("standby"),
        primary::Outcome::Alone(primary::Because::Claim) => Some("arbiter"),
        _ => None,
    }
}

fn outcome_word(outcome: &primary::Outcome) -> &'static str {
    match outcome {
        primary::Outcome::Alone(_) => "alone",
        primary::Outcome::HandedOver => "handed over",
        primary::Outcome::Lost => "lost",
        primary::Outcome::Failed(_) => "failed",
    }
}
