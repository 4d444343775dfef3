//! From the first primary to the last word.

use std::time::{Duration, Instant};

use sterna::replica::machines::standby::{Because, Event, Outcome, State};
use sterna::replica::{OperatorsWord, StandbyContact, StandbyState, StandbyStatistics};
use sterna_qmp::EventBus;
use sterna_qmp::drive::waiting::WaitingVm;
use sterna_qmp::standby::{StandbyControl, StandbyReport, Takeover};

use super::desk::Desk;
use super::{Arguments, LINE, LOOK, OnLoss, say};
use crate::exit::{Done, Status, Stop};
use crate::terminal;

/// How long a contact that this side ends may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// After so many takeovers that failed Ctrl-C ends the command.
const FAILURES: u32 = 2;

/// Holds checkpoints until the guest is somewhere for good.
pub struct Following<'a> {
    pub desk: &'a Desk,
    pub arguments: &'a Arguments,
    pub bus: &'a EventBus,
    before: StandbyStatistics,
    /// The last one that was printed.
    line: String,
    contact: Option<StandbyContact>,
    told: Option<State>,
    is_loss_told: bool,
    /// Takeovers without a contact that failed.
    failures: u32,
    /// The guest has come, so the VM that waits for it was started.
    is_launched: bool,
    began: Instant,
}

impl<'a> Following<'a> {
    pub fn new(desk: &'a Desk, arguments: &'a Arguments, bus: &'a EventBus) -> Self {
        let (before, line, contact, told, is_loss_told, failures, is_launched) = Default::default();
        let began = Instant::now();
        Self { desk, arguments, bus, before, line, contact, told, is_loss_told, failures, is_launched, began }
    }

    pub fn run(mut self) -> Done {
        let mut seen = self.desk.interrupts.count();
        let mut due = Instant::now();
        loop {
            let report = self.desk.report();
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

    /// A line a second, but not the same one again and again: a primary may come in days.
    fn print_line(&mut self, report: &StandbyReport) {
        let line = say::line(self.arguments.json, report, &self.before);
        self.before = report.statistics;
        if self.arguments.json || line != self.line {
            terminal::print(&line);
            self.line = line;
        }
    }

    /// What has happened since the last look.
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
                "sterna: the contact ended before its guest came: {why}; waiting for another"
            ));
            self.told = None;
        }
        self.contact = contact;
        if self.contact.is_some() {
            return self.look_at_contact(report);
        }
        match &report.state {
            StandbyState::Failed(why) => {
                Some(Err(Stop::failed(format!("{why}; nothing is held, and the primary has its guest"))))
            }
            StandbyState::Lost(why) if self.arguments.on_loss == OnLoss::Image => {
                if std::mem::replace(&mut self.is_loss_told, true) {
                    return None;
                }
                terminal::note(&format!("sterna: the primary is gone: {why}"));
                self.take_over("error")
            }
            StandbyState::Lost(why) => {
                if !std::mem::replace(&mut self.is_loss_told, true) {
                    terminal::note(&format!(
                        "sterna: the primary is gone: {why}. Its last checkpoint is held; Ctrl-C (or `sterna takeover`) makes an \
                         image of it, for which the primary's guest must not run any more"
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
            self.told = Some(contact.state);
            if contact.state == State::Preparing {
                self.began = Instant::now();
                self.bus.emit("COLO_EXIT", Some(serde_json::json!({"mode": "secondary", "reason": "error"})));
            }
            if let Some(text) = say::note(report) {
                terminal::note(&text);
            }
        }
        match contact.outcome? {
            Outcome::Running(_) => Some(self.taken_over(report)),
            Outcome::Discarded(because) => Some(Err(discarded(because, report))),
        }
    }

    fn taken_over(&self, report: &StandbyReport) -> Done {
        let ready = self.desk.place.ready();
        let ready = ready.ok_or_else(|| Stop::failed("the guest was started before it was made ready"))?;
        // It lives on, with its monitor.
        let vm = self.desk.place.vm().and_then(WaitingVm::release);
        terminal::print(&say::end(self.arguments, report, &ready, vm.as_ref(), self.began.elapsed()));
        Ok(Status::Done)
    }

    /// Without a contact. Who gave --on-loss image, Ctrl-C or the monitor's command, has said that the primary's guest does
    /// not run.
    fn take_over(&mut self, reason: &str) -> Option<Done> {
        self.began = Instant::now();
        self.bus.emit("COLO_EXIT", Some(serde_json::json!({"mode": "secondary", "reason": reason})));
        match self.desk.standby.takeover_by(&*self.desk.place, &OperatorsWord) {
            Ok(_) => Some(self.taken_over(&self.desk.report())),
            Err(error) => {
                self.failures += 1;
                self.is_loss_told = true;
                let next =
                    if self.failures < FAILURES { "tries again" } else { "ends this command, and drops it" };
                terminal::note(&format!(
                    "sterna: error: {error}. This may be the only copy of the guest: mend that, then `sterna takeover`. Ctrl-C {next}"
                ));
                None
            }
        }
    }

    /// Ctrl-C.
    fn interrupted(&mut self) -> Option<Done> {
        if let Some(contact) = self.desk.standby.contact() {
            return self.interrupted_in_contact(&contact);
        }
        let state = self.desk.standby.state();
        if let StandbyState::Waiting = state {
            return Some(Err(Stop::with(Status::Cancelled, "ended; no primary had come")));
        }
        if let StandbyState::Lost(_) = state {
            if self.failures < FAILURES {
                return self.take_over("request");
            }
            return Some(Err(Stop::failed(
                "ended; the guest could not be taken over, and what was held is dropped",
            )));
        }
        // It lives: a copy of its guest must not be started, and is of no use.
        let why = "ended; what was held is dropped, and the guest stays with the primary (give it x-colo-lost-heartbeat)";
        Some(Err(Stop::with(Status::Cancelled, why)))
    }

    fn interrupted_in_contact(&mut self, contact: &StandbyContact) -> Option<Done> {
        let state = contact.state().state;
        if state <= State::Following && contact.is_in_contact() {
            // The primary goes on without asking anybody.
            contact.failed("the standby was ended by its operator", Event::LocalFailure);
            let outcome = contact.wait(LAST_WORDS);
            let what = match outcome {
                Some(Outcome::Discarded(_)) => "the primary knows and has the guest",
                _ => "whether the primary has heard so is unknown: it asks its arbiter",
            };
            return Some(Err(Stop::with(
                Status::Cancelled,
                format!("ended; what was held is dropped, and {what}"),
            )));
        }
        if state == State::Claiming && self.desk.judge.is_operator() && self.arguments.qmp.is_none() {
            // The operator's word, which cannot be given otherwise.
            if let Err(why) = self.desk.take_over(Takeover::default()) {
                terminal::note(&format!("sterna: {why}"));
            }
            return None;
        }
        if !std::mem::replace(&mut self.is_loss_told, true) {
            terminal::note(
                "sterna: contact with the primary is lost, and this side may soon have the only guest: it goes on. A further Ctrl-C \
                 ends it, and drops what is held",
            );
            return None;
        }
        let why = "ended; what was held is dropped. If the arbiter had given this side the claim, the primary cannot win it any \
                   more: find out by hand where the guest may start";
        Some(Err(Stop::failed(why)))
    }
}

fn discarded(because: Because, report: &StandbyReport) -> Stop {
    let why = report.trouble().unwrap_or_else(|| "no reason was given".to_owned());
    let (status, text) = match because {
        Because::ClaimLost => (
            Status::Discarded,
            "the arbiter gave the claim to the primary, which has the guest; everything that was held is discarded"
                .to_owned(),
        ),
        Because::Unprotected => (
            Status::Discarded,
            "the primary has ended the protection and has the guest; everything that was held is discarded"
                .to_owned(),
        ),
        Because::ArbiterOutOfReach => (
            Status::Discarded,
            "the primary had given its guest, and the arbiter could not be asked: nothing was claimed, the primary goes on with \
             the guest, and everything that was held is discarded: protect it again when the arbiter is there"
                .to_owned(),
        ),
        Because::NothingHeld => {
            (Status::Failed, format!("{why}; no checkpoint was held, and the primary has its guest"))
        }
        Because::LocalFailure => (
            Status::Failed,
            format!("{why}; the primary was told and has the guest, and everything that was held is discarded"),
        ),
    };
    Stop::with(status, text)
}
