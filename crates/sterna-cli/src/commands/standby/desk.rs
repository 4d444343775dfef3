//! The operator's commands to a standby, over its monitor or by Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_drive::waiting::WaitingVm;
use sterna_qmp::standby::{StandbyControl, StandbyReport, Takeover};
use sterna_standby::machines::standby::State;
use sterna_standby::{Standby, StandbyContact};

use super::judge::Judge;
use super::place::Place;
use crate::interrupts::Interrupts;
use crate::terminal;

/// Executes the operator's commands.
pub struct Desk {
    pub standby: Standby,
    pub judge: Arc<Judge>,
    pub place: Arc<Place>,
    pub interrupts: Interrupts,
    /// The operator has requested a takeover while there is no contact.
    is_wanted: AtomicBool,
    /// The operator has requested a planned takeover, and is the arbiter.
    is_planned: AtomicBool,
}

impl Desk {
    pub fn new(standby: Standby, judge: Arc<Judge>, place: Arc<Place>, interrupts: Interrupts) -> Arc<Self> {
        let (is_wanted, is_planned) = Default::default();
        Arc::new(Self { standby, judge, place, interrupts, is_wanted, is_planned })
    }

    /// Ends the contact with a primary that answers but whose guest hangs.
    /// Lease, claim and fence then decide, as if the primary were lost.
    ///
    /// # Errors
    /// There is no contact, or a takeover is in progress.
    pub fn give_up_hung(&self) -> Result<(), String> {
        let contact = self.standby.contact().ok_or("there is no contact that could be closed")?;
        contact.take_over(false).map_err(|refusal| refusal.to_string())
    }

    /// Whether the operator has requested a takeover without an arbiter and a fence. Clears the request.
    pub fn takes_over_alone(&self) -> bool {
        self.is_wanted.swap(false, Ordering::AcqRel)
    }

    /// Claims a guest that the primary has given for a planned takeover, if the operator is the arbiter.
    pub fn look_whether_given(&self) {
        if self.is_planned.load(Ordering::Acquire)
            && let Some(contact) = self.standby.contact().filter(StandbyContact::is_given)
        {
            self.is_planned.store(false, Ordering::Release);
            if let Err(why) = self.judge.decide(contact.protection()) {
                terminal::note(&format!("sterna: the claim of the planned takeover failed: {why}"));
            }
        }
    }

    /// Starts the VM that waits for the guest. Until the VM is ready, the standby stores checkpoints as
    /// before.
    pub fn launch(&self) {
        let place = Arc::clone(&self.place);
        let launch = move || {
            if let Some(Err(error)) = place.vm().map(WaitingVm::launch) {
                terminal::note(&format!(
                    "sterna: warning: the VM that waits for the guest could not start: {error}. A takeover starts it \
                     once more; `sterna takeover SOCKET --image` writes an image instead"
                ));
            }
        };
        // Without a thread, the takeover starts the VM.
        let _ = std::thread::Builder::new().name("the VM that waits".to_owned()).spawn(launch);
    }

    fn take_over_by_contact(&self, contact: &StandbyContact, wish: Takeover) -> Result<(), String> {
        let text = |refusal: sterna_standby::machines::standby::Refusal| refusal.to_string();
        match contact.state().state {
            State::Claiming if wish.without_arbiter => self.decide_without_arbiter(wish),
            _ if wish.without_arbiter => Err(
                "--without-arbiter is only for a standby that waits for its arbiter, but its state is not \
                     `claiming`. Run `sterna takeover` first"
                    .to_owned(),
            ),
            State::Unready | State::Held => contact.retry().map_err(text),
            State::Unfenced if wish.vouches => contact.vouch().map_err(text),
            State::Unfenced => contact.retry().map_err(text),
            State::Claiming if self.judge.is_operator() && !wish.is_planned => {
                self.judge.check_word(contact.needs_fence(), wish.vouches)?;
                if wish.vouches {
                    self.judge.vouch();
                }
                self.decide(contact)
            }
            _ => {
                if self.judge.is_operator() && !wish.is_planned {
                    self.judge.check_word(contact.needs_fence(), wish.vouches)?;
                }
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

    /// Decides in place of an arbiter that never answers. The guest becomes an image and is not started.
    fn decide_without_arbiter(&self, wish: Takeover) -> Result<(), String> {
        if !(wish.vouches && wish.into_image) {
            return Err(
                "without the arbiter, the guest cannot start here, and the operator must confirm that the \
                        primary's guest does not run and never will: give `--image --vouch --without-arbiter`"
                    .to_owned(),
            );
        }
        self.place.want_image(true);
        self.judge.vouch();
        self.judge.go_without_arbiter();
        Ok(())
    }

    /// Gives the claim to this side, on behalf of the operator. The fence follows if the primary needs one.
    fn decide(&self, contact: &StandbyContact) -> Result<(), String> {
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
        let state = self.standby.contact().map(|contact| contact.state().state);
        if matches!(state, Some(State::Preparing | State::Claiming | State::Fencing | State::Starting)) {
            // The guest's place is already decided.
            return self.wish(wish);
        }
        let before = self.place.want_image(wish.into_image);
        let wished = self.wish(wish);
        if wished.is_err() {
            self.place.want_image(before);
        }
        wished
    }

    fn quit(&self) {
        self.interrupts.add();
    }
}

impl Desk {
    fn wish(&self, wish: Takeover) -> Result<(), String> {
        if let Some(contact) = self.standby.contact() {
            return self.take_over_by_contact(&contact, wish);
        }
        if wish.is_planned {
            return Err("a planned takeover needs contact to the primary (`sterna protect` there), and there is none; \
                        take over without `--planned` if the primary's guest does not run any more"
                .to_owned());
        }
        if self.standby.held().is_none() {
            return Err("this standby has no checkpoint yet: only the primary has the guest".to_owned());
        }
        self.is_wanted.store(true, Ordering::Release);
        Ok(())
    }
}
