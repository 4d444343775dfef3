//! The operator's word: over the monitor, or by Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna::replica::machines::standby::State;
use sterna::replica::{Standby, StandbyContact};
use sterna_qmp::drive::waiting::WaitingVm;
use sterna_qmp::standby::{StandbyControl, StandbyReport, Takeover};

use super::judge::Judge;
use super::place::Place;
use crate::interrupts::Interrupts;
use crate::terminal;

/// What an operator speaks with.
pub struct Desk {
    pub standby: Standby,
    pub judge: Arc<Judge>,
    pub place: Arc<Place>,
    pub interrupts: Interrupts,
    /// Without a contact: the operator wants the takeover.
    is_wanted: AtomicBool,
    /// The operator wants a planned one, and is the arbiter.
    is_planned: AtomicBool,
}

impl Desk {
    pub fn new(standby: Standby, judge: Arc<Judge>, place: Arc<Place>, interrupts: Interrupts) -> Arc<Self> {
        let (is_wanted, is_planned) = Default::default();
        Arc::new(Self { standby, judge, place, interrupts, is_wanted, is_planned })
    }

    /// Whether the operator wants a takeover for which nobody but the operator is asked.
    pub fn takes_over_alone(&self) -> bool {
        self.is_wanted.swap(false, Ordering::AcqRel)
    }

    /// A guest that was given for a planned takeover is this side's, where its operator is the arbiter.
    pub fn look_whether_given(&self) {
        if self.is_planned.load(Ordering::Acquire)
            && let Some(contact) = self.standby.contact().filter(StandbyContact::is_given)
        {
            self.is_planned.store(false, Ordering::Release);
            if let Err(why) = self.judge.decide(contact.protection()) {
                terminal::note(&format!("sterna: the planned takeover's claim: {why}"));
            }
        }
    }

    /// Starts the VM that waits for the guest. Until it has come up checkpoints are held as before.
    pub fn launch(&self) {
        let place = Arc::clone(&self.place);
        let launch = move || {
            if let Some(Err(error)) = place.vm().map(WaitingVm::launch) {
                terminal::note(&format!(
                    "sterna: warning: the VM that is to run the guest: {error}. It is started once more when the guest is taken over;                      `sterna takeover --image` makes an image instead"
                ));
            }
        };
        // A takeover starts it, too.
        let _ = std::thread::Builder::new().name("the VM that waits".to_owned()).spawn(launch);
    }

    fn take_over_by_contact(&self, contact: &StandbyContact, wish: Takeover) -> Result<(), String> {
        let text = |refusal: sterna::replica::machines::standby::Refusal| refusal.to_string();
        match contact.state().state {
            State::Unready | State::Held => contact.retry().map_err(text),
            State::Unfenced if wish.vouches => contact.vouch().map_err(text),
            State::Unfenced => contact.retry().map_err(text),
            State::Claiming if self.judge.is_operator() && !wish.is_planned => self.decide(contact),
            _ => {
                contact.take_over(wish.is_planned).map_err(text)?;
                if wish.vouches {
                    self.judge.vouch();
                }
                if !self.judge.is_operator() {
                    return Ok(());
                }
                if wish.is_planned {
                    self.is_planned.store(true, Ordering::Release);
                    return Ok(());
                }
                self.decide(contact)
            }
        }
    }

    /// The operator, who is the arbiter, says that the primary's guest does not run.
    fn decide(&self, contact: &StandbyContact) -> Result<(), String> {
        self.judge.vouch();
        self.judge.decide(contact.protection())
    }
}

impl StandbyControl for Desk {
    fn report(&self) -> StandbyReport {
        let mut report = StandbyReport::of(&self.standby);
        report.arbiter = Some(self.judge.arbiter());
        report.waiting_vm = self.place.vm().map(WaitingVm::status);
        report
    }

    fn take_over(&self, wish: Takeover) -> Result<(), String> {
        if wish.into_image {
            self.place.want_image();
        }
        if let Some(contact) = self.standby.contact() {
            return self.take_over_by_contact(&contact, wish);
        }
        if wish.is_planned {
            return Err("a planned takeover needs the primary's contact (`sterna protect` there), and there is none; take \
                        over without `--planned` if its guest does not run any more"
                .to_owned());
        }
        if self.standby.held().is_none() {
            return Err("nothing is held yet: the guest is at the primary alone".to_owned());
        }
        self.is_wanted.store(true, Ordering::Release);
        Ok(())
    }

    fn quit(&self) {
        self.interrupts.add();
    }
}
