//! The primary's process: its machine, the guest, the gate, and checkpoints.

use super::planted::Planted;
use super::schedule::{Place, SECOND};
use super::state::{Guest, Item, Message, Side, Snapshot, Staging};
use super::world::World;
use crate::replica::Ruling;
use crate::replica::primary::{Action, Event, Refusal};

impl World<'_> {
    pub(super) fn primary_ticks(&mut self) {
        self.primary.tick_at = None;
        self.primary_feeds(Event::Tick);
    }

    pub(super) fn primary_feeds(&mut self, event: Event) {
        if !self.primary.is_alive {
            return;
        }
        let (now, before) = (self.local(Side::Primary), self.primary.machine.state());
        let answer = self.primary.machine.handle(now, event);
        let state = self.primary.machine.state();
        if state != before {
            self.entered(Place::Primary(state));
        }
        match answer {
            Ok(actions) => self.primary_queues(actions),
            Err(Refusal::OutOfOrder { .. } | Refusal::CheckpointOutOfOrder { .. }) => {
                self.violate(&format!("machine: the primary refused {event:?} in {before:?}"));
            }
            Err(_) => {}
        }
        self.arm(Side::Primary);
    }

    fn primary_queues(&mut self, actions: Vec<Action>) {
        let was_idle = self.primary.actions.is_empty();
        self.primary.actions.extend(actions);
        if was_idle && !self.primary.actions.is_empty() {
            let delay = self.rng.below(100);
            self.push(delay, Item::Performs(Side::Primary));
        }
    }

    /// Performs the next action, or the next piece of an action that releases output.
    pub(super) fn primary_performs(&mut self) {
        if !self.primary.is_alive {
            return self.primary.actions.clear();
        }
        let Some(&action) = self.primary.actions.front() else { return };
        let is_done = match action {
            Action::Release(epoch) => !self.lets_go(epoch),
            Action::OpenGate => {
                let is_empty = !self.lets_go(u64::MAX);
                self.primary.is_gate_open |= is_empty;
                is_empty
            }
            Action::TakeLastCheckpoint if self.primary.staging.is_some() => false,
            _ => {
                self.note(|| format!("  primary: {action:?}"));
                self.primary_does(action);
                true
            }
        };
        if is_done {
            self.primary.actions.pop_front();
        }
        if !self.primary.actions.is_empty() {
            let delay = self.rng.below(50);
            self.push(delay, Item::Performs(Side::Primary));
        }
    }

    fn primary_does(&mut self, action: Action) {
        let ours = self.protection;
        match action {
            Action::SendHeartbeat(number) => {
                self.primary.last_beat = number;
                self.send(Side::Standby, Message::Heartbeat(ours, number));
            }
            Action::TakeLastCheckpoint => self.begins_checkpoint(true),
            Action::SendGive => self.send(Side::Standby, Message::Give(ours)),
            Action::SendGone => self.send(Side::Standby, Message::Gone(ours)),
            Action::SendUnprotect => self.send(Side::Standby, Message::Unprotect(ours)),
            Action::StopGuest if self.is_planted(Planted::RunsOnWithoutLease) => {}
            Action::StopGuest => self.primary.guest.is_running = false,
            Action::CloseChannels => self.close(Side::Primary),
            Action::Claim if self.is_planted(Planted::PrimaryDoesNotAsk) => {
                self.primary_feeds(Event::Ruled(Ruling::Won));
            }
            Action::Claim => self.asks_arbiter(Side::Primary),
            Action::ResumeGuest => {
                self.primary.guest.is_running = true;
                self.primary.guest.is_paused = false;
            }
            Action::DropOutput => self.primary.gate.clear(),
            Action::DestroyGuest => self.primary.guest = Guest::default(),
            Action::Finish(outcome) => self.primary.outcome = Some(outcome),
            Action::Release(_) | Action::OpenGate => {}
        }
    }

    /// Releases one piece of output; returns false if none may be released.
    fn lets_go(&mut self, epoch: u64) -> bool {
        let Some(&(of, number)) = self.primary.gate.front() else { return false };
        let now = self.local(Side::Primary);
        let may = self.primary.machine.may_say(now, of) || self.is_planted(Planted::GateDoesNotLook);
        if of > epoch || !may {
            return false;
        }
        self.primary.gate.pop_front();
        self.primary_says(number);
        true
    }

    pub(super) fn guest_steps(&mut self, side: Side) {
        match side {
            Side::Primary => self.primary_steps(),
            Side::Standby => self.standby_steps(),
        }
        let pause = if self.now > 4 * SECOND { 300_000 } else { 30_000 };
        let delay = 1_000 + self.rng.below(pause);
        self.push(delay, Item::GuestSteps(side));
    }

    fn primary_steps(&mut self) {
        if !self.primary.guest.runs() {
            return;
        }
        self.primary.guest.state += 1;
        let number = self.primary.guest.state;
        if let Some(staging) = &mut self.primary.staging {
            staging.snapshot.is_torn = true;
        }
        if self.primary.is_gate_open {
            self.primary_says(number);
        } else if self.primary.is_alive {
            self.primary.gate.push_back((self.primary.captured + 1, number));
        }
    }

    pub(super) fn primary_takes(&mut self) {
        if !self.primary.is_alive || self.primary.machine.state().is_final() {
            return;
        }
        let interval = self.phase.interval;
        self.push(interval, Item::Takes);
        if self.primary.machine.may_take_checkpoint() && self.primary.staging.is_none() {
            self.begins_checkpoint(false);
        }
    }

    fn begins_checkpoint(&mut self, is_last: bool) {
        let guest = &mut self.primary.guest;
        let number = self.primary.captured + 1;
        let snapshot = Snapshot { number, state: guest.state, is_torn: false };
        guest.is_paused = is_last || self.schedule.planted != Some(Planted::ResumedBeforeProtected);
        self.primary.staging = Some(Staging { snapshot, is_last });
        let delay = self.work(5_000);
        self.push(delay, Item::Staged);
    }

    pub(super) fn primary_staged(&mut self) {
        let Some(Staging { snapshot, is_last }) = self.primary.staging.take() else { return };
        if !self.primary.is_alive {
            // QEMU resumes the guest by itself when its connection is closed.
            self.primary.guest.is_paused = false;
            return;
        }
        let number = snapshot.number;
        self.primary_feeds(match is_last {
            true => Event::LastCheckpointTaken(number),
            false => Event::CheckpointTaken(number),
        });
        self.primary.captured = number;
        let now = self.local(Side::Primary);
        if self.primary.machine.may_guest_run(now) {
            self.primary.guest.is_paused = false;
        }
        if !self.primary.machine.state().is_in_contact() {
            return;
        }
        self.primary.is_gate_open = false;
        self.send(Side::Standby, Message::Pages(snapshot));
        self.send(Side::Standby, Message::Checkpoint(snapshot));
        if self.is_planted(Planted::ReleaseOnSent) {
            while let Some(&(epoch, said)) = self.primary.gate.front()
                && epoch <= number
            {
                self.primary.gate.pop_front();
                self.primary_says(said);
            }
        }
    }

    pub(super) fn primary_reads(&mut self, message: Message) {
        self.primary_feeds(match message {
            Message::Answer(mut answer) => {
                if self.is_planted(Planted::LeaseFromReceipt) {
                    answer.heartbeat = self.primary.last_beat;
                }
                Event::Answered(answer)
            }
            Message::Never(protection) => Event::Never(protection),
            Message::Runs(protection) => Event::StandbyRuns(protection),
            Message::HandOver(protection) => Event::HandOverRequested(protection),
            _ => Event::PeerMisbehaved,
        });
    }

    pub(super) fn crash_primary(&mut self) {
        if !std::mem::replace(&mut self.primary.is_alive, false) {
            return;
        }
        if !self.phase.is_qemu {
            self.primary.guest = Guest::default();
        }
        self.primary.gate.clear();
        if std::mem::replace(&mut self.primary.is_open, false) {
            self.peer_notices(Side::Standby);
        }
    }
}
