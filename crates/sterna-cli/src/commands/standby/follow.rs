//! The main loop of `sterna standby`, from the first primary to the end of the command.

use std::time::{Duration, Instant};

use sterna_drive::waiting::WaitingVm;
use sterna_qmp::EventBus;
use sterna_qmp::migration::events::COLO_EXIT;
use sterna_qmp::standby::{StandbyControl, StandbyReport, Takeover};
use sterna_standby::machines::standby::{Because, Event, Outcome, State};
use sterna_standby::{OperatorsWord, StandbyContact, StandbyState, StandbyStatistics};

use super::arguments::{Arguments, LINE, LOOK, OnLoss};
use super::desk::Desk;
use super::say;
use crate::exit::{Done, Status, Stop};
use crate::protection_record::{GuestAt, Look, ProtectionRecord, Recorder};
use crate::{terminal, units};

/// How long the message to the primary may take when this side ends a contact.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Number of failed takeovers after which Ctrl-C ends the command.
const FAILURES: u32 = 2;

/// Receives checkpoints until the guest is at its final place.
pub struct Following<'a> {
    pub desk: &'a Desk,
    pub arguments: &'a Arguments,
    pub bus: &'a EventBus,
    before: StandbyStatistics,
    /// The line that was printed last.
    line: String,
    contact: Option<StandbyContact>,
    told: Option<State>,
    is_loss_told: bool,
    /// The operator was warned that no checkpoints arrive.
    is_hang_told: bool,
    /// The contact was ended because no checkpoints arrived.
    has_given_up_hung: bool,
    /// The operator was asked to vouch with another Ctrl-C.
    has_asked_to_vouch: bool,
    /// Failed takeovers without a contact.
    failures: u32,
    /// A guest has arrived, so the VM that waits for it was started.
    is_launched: bool,
    began: Instant,
    /// The record of the present primary's protection.
    recorder: Option<Recorder>,
}

impl<'a> Following<'a> {
    pub fn new(desk: &'a Desk, arguments: &'a Arguments, bus: &'a EventBus) -> Self {
        let (before, line, contact, told, failures, is_launched) = Default::default();
        let (is_loss_told, is_hang_told, has_given_up_hung, has_asked_to_vouch) = Default::default();
        let began = Instant::now();
        Self {
            desk,
            arguments,
            bus,
            before,
            line,
            contact,
            told,
            is_loss_told,
            is_hang_told,
            has_given_up_hung,
            has_asked_to_vouch,
            failures,
            is_launched,
            began,
            recorder: None,
        }
    }

    /// Follows until the guest is at its final place. Returns the end of the command, and the record of the protection if
    /// there was one and it is wanted.
    pub fn run(mut self) -> (Done, Option<ProtectionRecord>) {
        let done = self.follow();
        let recorder = self.recorder.take().map(|mut recorder| {
            recorder.look(Look::at_standby(&self.desk.report().to_json()));
            match &done {
                Ok(_) => recorder.end(None, Some(GuestAt::Standby), "this standby has taken the guest over"),
                Err(stop) => {
                    let is_given_back = stop.status == Status::Discarded;
                    recorder.end(None, is_given_back.then_some(GuestAt::Primary), &stop.message);
                }
            }
            recorder
        });
        (done, recorder.map(|recorder| recorder.record().clone()))
    }

    /// Adds a sample to the record. It begins with the primary's guest.
    fn record(&mut self, report: &StandbyReport) {
        if self.arguments.report.is_none() {
            return;
        }
        if matches!(report.state, StandbyState::Waiting) {
            // A primary that has disconnected before its guest arrived leaves no record.
            self.recorder = None;
            return;
        }
        let new = || Recorder::at_standby(&report.address.to_string());
        self.recorder.get_or_insert_with(new).look(Look::at_standby(&report.to_json()));
    }

    fn follow(&mut self) -> Done {
        let mut seen = 0;
        let mut due = Instant::now();
        loop {
            let report = self.desk.report();
            self.record(&report);
            if let Some(done) = self.look(&report) {
                return done;
            }
            if Instant::now() >= due {
                due = Instant::now() + LINE;
                self.print_line(&report);
            }
            self.desk.interrupts.sleep(LOOK, seen);
            if self.desk.interrupts.count() > seen {
                seen = self.desk.interrupts.count();
                if let Some(done) = self.interrupted() {
                    return done;
                }
            }
        }
    }

    /// Prints a line per second. Repeated lines are left out, because a primary may connect only after days.
    fn print_line(&mut self, report: &StandbyReport) {
        let line = say::line(self.arguments.json, report, &self.before);
        self.before = report.statistics;
        if self.arguments.json || line != self.line {
            terminal::print(&line);
            self.line = line;
        }
    }

    /// Handles the changes since the previous call.
    fn look(&mut self, report: &StandbyReport) -> Option<Done> {
        self.desk.look_whether_given();
        if matches!(report.state, StandbyState::Following) && !std::mem::replace(&mut self.is_launched, true)
        {
            self.desk.launch();
        }
        if self.desk.takes_over_alone() {
            return self.take_over("request");
        }
        let contact = self.desk.standby.contact();
        if let Some(gone) = self.contact.take().filter(|_| contact.is_none()) {
            let why = gone.state().trouble.unwrap_or_else(|| "no reason was given".to_owned());
            terminal::note(&format!(
                "sterna: the primary's connection ended before its guest arrived: {why}; waiting for another primary"
            ));
            self.told = None;
        }
        self.contact = contact;
        if self.contact.is_some() {
            return self.look_at_contact(report);
        }
        match &report.state {
            StandbyState::Failed(why) => Some(Err(Stop::failed(format!(
                "{why}; this standby has no checkpoint, and the primary has its guest"
            )))),
            StandbyState::Lost(why) if self.arguments.on_loss == OnLoss::Image => {
                if std::mem::replace(&mut self.is_loss_told, true) {
                    return None;
                }
                terminal::note(&format!("sterna: the connection to the primary is lost: {why}"));
                self.take_over("error")
            }
            StandbyState::Lost(why) => {
                if !std::mem::replace(&mut self.is_loss_told, true) {
                    terminal::note(&format!(
                        "sterna: the connection to the primary is lost: {why}. This standby holds its last \
                         checkpoint; {} an image of it. Make sure first that the primary's guest does not run any more",
                        self.word().makes_image()
                    ));
                }
                None
            }
            _ => None,
        }
    }

    fn look_at_contact(&mut self, report: &StandbyReport) -> Option<Done> {
        let contact = report.contact.as_ref()?;
        if self.told != Some(contact.state) {
            let before = self.told.replace(contact.state);
            let has_fence = self.desk.judge.has_fence();
            if has_fence && before == Some(State::Fencing) && contact.state == State::Starting {
                terminal::note(say::FENCED);
            }
            if contact.state == State::Preparing {
                self.began = Instant::now();
                self.bus.emit(&COLO_EXIT, Some(serde_json::json!({"mode": "secondary", "reason": "error"})));
            }
            let is_given = self.contact.as_ref().is_some_and(StandbyContact::is_given);
            if let Some(text) = say::note(report, self.word(), has_fence, is_given) {
                terminal::note(&text);
            }
        }
        self.look_whether_hung(report);
        match contact.outcome? {
            Outcome::Running(_) => Some(self.taken_over(report)),
            Outcome::Discarded(because) => Some(Err(discarded(because, report))),
        }
    }

    /// Warns once that no more checkpoints arrive, and takes over if the operator has configured that.
    fn look_whether_hung(&mut self, report: &StandbyReport) {
        let hangs = report.hangs();
        if hangs != std::mem::replace(&mut self.is_hang_told, hangs) {
            let trouble = report.trouble().filter(|_| hangs);
            // The end of the contact has its own message.
            let is_followed = report
                .contact
                .as_ref()
                .is_some_and(|contact| contact.is_connected && contact.state == State::Following);
            match trouble {
                Some(trouble) => terminal::note(&format!("sterna: warning: {trouble}")),
                None if is_followed => terminal::note("sterna: checkpoints arrive again"),
                None => {}
            }
        }
        let (Some(limit), Some(age)) = (self.arguments.takeover_on_hang, report.statistics.age) else {
            return;
        };
        if !hangs || age < limit || std::mem::replace(&mut self.has_given_up_hung, true) {
            return;
        }
        terminal::note(&format!(
            "sterna: no checkpoint has arrived for {}: this standby closes the contact and takes over with claim and \
             fence (--takeover-on-hang)",
            units::time(age)
        ));
        if let Err(why) = self.desk.give_up_hung() {
            terminal::note(&format!("sterna: {why}"));
        }
    }

    fn taken_over(&self, report: &StandbyReport) -> Done {
        let ready = self.desk.place.ready();
        let ready = ready.ok_or_else(|| Stop::failed("the guest was started before it was prepared"))?;
        // The VM outlives this command, and so does its monitor.
        let vm = self.desk.place.vm().and_then(WaitingVm::release);
        terminal::print(&say::end(self.arguments, report, &ready, vm.as_ref(), self.began.elapsed()));
        Ok(Status::Done)
    }

    /// Takes over without a contact.
    /// By `--on-loss image`, by Ctrl-C, or by the monitor's command, the operator has confirmed that the
    /// primary's guest does not run.
    fn take_over(&mut self, reason: &str) -> Option<Done> {
        self.began = Instant::now();
        self.bus.emit(&COLO_EXIT, Some(serde_json::json!({"mode": "secondary", "reason": reason})));
        match self.desk.standby.takeover_by(&*self.desk.place, &OperatorsWord) {
            Ok(_) => Some(self.taken_over(&self.desk.report())),
            Err(error) => {
                self.failures += 1;
                self.is_loss_told = true;
                let next = if self.failures < FAILURES {
                    "tries again"
                } else {
                    "ends this command, and discards the copy"
                };
                let again =
                    self.arguments.qmp.as_ref().map(|_| self.word().again() + ", ").unwrap_or_default();
                terminal::note(&format!(
                    "sterna: error: {error}. This may be the only copy of the guest: remove the cause, then \
                     {again}Ctrl-C {next}"
                ));
                None
            }
        }
    }

    fn word(&self) -> say::Word<'_> {
        say::Word(self.arguments.qmp.as_ref())
    }

    /// Handles Ctrl-C. Returns the end of the command, if it ends.
    fn interrupted(&mut self) -> Option<Done> {
        if let Some(contact) = self.desk.standby.contact() {
            return self.interrupted_in_contact(&contact);
        }
        let state = self.desk.standby.state();
        if let StandbyState::Waiting = state {
            return Some(Err(Stop::with(Status::Cancelled, "ended; no primary had connected")));
        }
        if let StandbyState::Lost(_) = state {
            if self.failures < FAILURES {
                return self.take_over("request");
            }
            return Some(Err(Stop::failed(
                "ended; the guest could not be taken over, and its checkpoint is discarded",
            )));
        }
        // The primary is alive. A copy of its guest must not be started, and has no use.
        let why = "ended; the checkpoint is discarded, and the guest stays with the primary: run \
                   `x-colo-lost-heartbeat` at its monitor";
        Some(Err(Stop::with(Status::Cancelled, why)))
    }

    fn interrupted_in_contact(&mut self, contact: &StandbyContact) -> Option<Done> {
        let state = contact.state().state;
        if state <= State::Following && contact.is_in_contact() {
            // This informs the primary, so that it continues without asking its arbiter.
            contact.failed("the standby was ended by its operator", Event::LocalFailure);
            let outcome = contact.wait(LAST_WORDS);
            let what = match outcome {
                Some(Outcome::Discarded(_)) => "the primary has confirmed the end and has the guest",
                _ => "the primary has not confirmed the end, and will ask its arbiter",
            };
            return Some(Err(Stop::with(
                Status::Cancelled,
                format!("ended; the checkpoint is discarded, and {what}"),
            )));
        }
        // A signal of a host that shuts down is no operator's answer.
        let is_word = self.arguments.qmp.is_none() && !self.desk.interrupts.must_end();
        if state == State::Claiming && self.desk.judge.is_operator() && is_word {
            // Ctrl-C is the only way for the operator to decide.
            let needs_word = self.desk.judge.check_word(contact.needs_fence(), false).is_err();
            self.give_word(needs_word);
            return None;
        }
        if matches!(state, State::Unready | State::Unfenced | State::Held) && is_word {
            // This checkpoint may be the only copy of the guest. Without a monitor, Ctrl-C is the only way to
            // retry a failed step.
            self.give_word(state == State::Unfenced && !self.desk.judge.has_fence());
            return None;
        }
        if !std::mem::replace(&mut self.is_loss_told, true) {
            terminal::note(
                "sterna: the contact to the primary is lost, and this side may soon have the only copy of the guest: \
                 this command continues. Another Ctrl-C ends it and discards the checkpoint",
            );
            return None;
        }
        let why = "ended; the checkpoint is discarded. If the arbiter had given this side the claim, the primary \
                   cannot get it any more: decide yourself where the guest may start";
        Some(Err(Stop::failed(why)))
    }
}

impl Following<'_> {
    /// Takes over on behalf of an operator who has no monitor.
    /// `vouches`: the operator must also confirm, with another Ctrl-C, that the primary's guest does not run.
    fn give_word(&mut self, vouches: bool) {
        if vouches && !std::mem::replace(&mut self.has_asked_to_vouch, true) {
            terminal::note(
                "the primary cannot stop its guest by itself, and this standby has no --fence. Make sure that the \
                 primary's guest does not run and never will. Another Ctrl-C confirms this, and starts the guest here",
            );
            return;
        }
        match self.desk.take_over(Takeover { vouches, ..Takeover::default() }) {
            Ok(_) => {
                // If the step fails again, the failure is printed although the state is the same. A Ctrl-C during the step warns
                // first, because it would end this command.
                self.told = None;
                self.is_loss_told = false;
            }
            Err(why) => terminal::note(&format!("sterna: {why}")),
        }
    }
}

fn discarded(because: Because, report: &StandbyReport) -> Stop {
    let why = report.trouble().unwrap_or_else(|| "no reason was given".to_owned());
    let (status, text) = match because {
        Because::ClaimLost => (
            Status::Discarded,
            "the arbiter gave the claim to the primary, which has the guest; the checkpoint is discarded"
                .to_owned(),
        ),
        Because::Unprotected => (
            Status::Discarded,
            "the primary has ended the protection: it has the guest, or the guest was ended there intentionally; the \
             checkpoint is discarded"
                .to_owned(),
        ),
        Because::ArbiterOutOfReach => (
            Status::Discarded,
            "the arbiter could not be reached during the planned takeover: nothing was claimed, the guest continues \
             to run at the primary, and the checkpoint is discarded. Protect the guest again when the arbiter can be \
             reached"
                .to_owned(),
        ),
        Because::NothingHeld => {
            (Status::Failed, format!("{why}; this standby had no checkpoint, and the primary has its guest"))
        }
        Because::LocalFailure => (
            Status::Failed,
            format!("{why}; the primary was informed and has the guest, and the checkpoint is discarded"),
        ),
    };
    Stop::with(status, text)
}
