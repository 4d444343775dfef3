//! The standby's process: its machine, its checkpoints, and the guest that it may start.

use super::planted::Planted;
use super::schedule::{Effect, Place, SECOND};
use super::state::{Guest, Item, Message, Side, Snapshot};
use super::world::World;
use crate::replica::standby::{Action, Event, Refusal, State};
use crate::replica::{Answer, Ruling};
use crate::sim::Micros;

impl World<'_> {
    pub(super) fn standby_ticks(&mut self) {
        self.standby.tick_at = None;
        self.standby_feeds(Event::Tick);
    }

    pub(super) fn standby_feeds(&mut self, event: Event) {
        if !self.standby.is_alive {
            return;
        }
        let (now, before) = (self.local(Side::Standby), self.standby.machine.state());
        let answer = self.standby.machine.handle(now, event);
        let state = self.standby.machine.state();
        if state != before {
            self.entered(Place::Standby(state));
            if matches!(state, State::Unready | State::Unfenced | State::Held) {
                let delay = SECOND + self.rng.below(4 * SECOND);
                self.push(delay, Item::Retries);
            }
        }
        match answer {
            Ok(actions) => {
                let was_idle = self.standby.actions.is_empty();
                self.standby.actions.extend(actions);
                if was_idle && !self.standby.actions.is_empty() {
                    let delay = self.rng.below(100);
                    self.push(delay, Item::Performs(Side::Standby));
                }
            }
            Err(Refusal::OutOfOrder { .. } | Refusal::CheckpointOutOfOrder { .. }) => {
                self.violate(&format!("machine: the standby refused {event:?} in {before:?}"));
            }
            Err(_) => {}
        }
        self.arm(Side::Standby);
    }

    pub(super) fn standby_performs(&mut self) {
        if !self.standby.is_alive {
            return self.standby.actions.clear();
        }
        let Some(action) = self.standby.actions.pop_front() else { return };
        self.note(|| format!("  standby: {action:?}"));
        self.standby_does(action);
        if !self.standby.actions.is_empty() {
            let delay = self.rng.below(50);
            self.push(delay, Item::Performs(Side::Standby));
        }
    }

    fn standby_does(&mut self, action: Action) {
        let ours = self.protection;
        match action {
            Action::SendAnswer(answer) => self.standby_sends(Message::Answer(answer)),
            Action::SendNever => self.standby_sends(Message::Never(ours)),
            Action::SendRuns => self.standby_sends(Message::Runs(ours)),
            Action::SendHandOver => self.standby_sends(Message::HandOver(ours)),
            Action::CloseChannels if self.is_planted(Planted::AnswersWhileClaiming) => {}
            Action::CloseChannels => self.close(Side::Standby),
            Action::Prepare(_) => self.effect_begins(Effect::Prepare, 100_000),
            Action::Claim if self.is_planted(Planted::StandbyDoesNotAsk) => {
                self.standby_feeds(Event::Ruled(Ruling::Won));
            }
            Action::Claim => self.asks_arbiter(Side::Standby),
            Action::Fence => self.effect_begins(Effect::Fence, 300_000),
            Action::Start => self.effect_begins(Effect::Start, 50_000),
            Action::Discard => self.standby.whole = None,
            Action::Finish(outcome) => self.standby.outcome = Some(outcome),
        }
    }

    fn standby_sends(&mut self, message: Message) {
        if self.standby.is_open {
            self.send(Side::Primary, message);
        }
    }

    fn effect_begins(&mut self, effect: Effect, usual: Micros) {
        let (fails, delay) = (self.fails(effect), self.work(usual));
        self.push(delay, Item::Effect(effect, !fails));
    }

    pub(super) fn effect_ends(&mut self, effect: Effect, is_done: bool) {
        if !self.standby.is_alive {
            return;
        }
        match (effect, is_done) {
            (Effect::Fence, true) if !self.is_planted(Planted::NoFence) => self.fence(),
            (Effect::Start, true) => self.standby_starts(),
            _ => {}
        }
        self.standby_feeds(match (effect, is_done) {
            (Effect::Prepare, true) => {
                Event::Prepared { is_arbiter_in_reach: self.finds_arbiter(Side::Standby) }
            }
            (Effect::Prepare, false) => Event::PrepareFailed,
            (Effect::Fence, true) => Event::Fenced,
            (Effect::Fence, false) => Event::FenceFailed,
            (Effect::Start, true) => Event::Started,
            (Effect::Start, false) => Event::StartFailed,
        });
    }

    /// Plays the fence, which switches off the primary's host.
    fn fence(&mut self) {
        self.crash_primary();
        self.primary.guest = Guest::default();
    }

    fn standby_starts(&mut self) {
        let held = self.standby.machine.held();
        let Some(whole) = self.standby.whole.filter(|whole| whole.number == held) else {
            return self.violate("invariant 4: the standby starts from a checkpoint that did not come whole");
        };
        if whole.is_torn || self.standby.is_mixed {
            self.violate("invariant 4: the standby starts from a state that never was");
        }
        if self.facts.heard > whole.state {
            self.violate("invariant 1: the observer has heard more than the state that survives knows");
        }
        self.facts.standby_started = true;
        self.standby.guest = Guest { exists: true, is_running: true, is_paused: false, state: whole.state };
        self.push(1_000, Item::GuestSteps(Side::Standby));
    }

    pub(super) fn standby_steps(&mut self) {
        if self.standby.is_alive && self.standby.guest.runs() {
            self.standby.guest.state += 1;
            self.facts.heard = self.facts.heard.max(self.standby.guest.state);
        }
    }

    pub(super) fn standby_reads(&mut self, message: Message) {
        match message {
            Message::Pages(snapshot) => self.standby_reads_pages(snapshot),
            Message::Checkpoint(snapshot) => {
                if !self.is_planted(Planted::HeldBeforeWhole) {
                    self.standby_feeds(Event::CheckpointHeld(snapshot.number));
                }
                // A checkpoint that arrives too late is not the one that is being prepared.
                if self.standby.machine.held() == snapshot.number {
                    self.standby.whole = Some(snapshot);
                    self.standby.is_mixed = false;
                }
            }
            Message::Heartbeat(protection, number) => {
                let is_over = !matches!(self.standby.machine.state(), State::Seeding | State::Following)
                    || !self.standby.machine.is_in_contact();
                if is_over && self.is_planted(Planted::AnswersWhileClaiming) {
                    let held = self.standby.machine.held();
                    self.standby_sends(Message::Answer(Answer { protection, held, heartbeat: number }));
                }
                self.standby_feeds(Event::Heartbeat(protection, number));
            }
            Message::Unprotect(protection) => self.standby_feeds(Event::UnprotectRead(protection)),
            Message::Gone(protection) => self.standby_feeds(Event::GoneRead(protection)),
            Message::Give(protection) => self.standby_feeds(Event::GiveRead(protection)),
            _ => self.standby_feeds(Event::PeerMisbehaved),
        }
    }

    fn standby_reads_pages(&mut self, snapshot: Snapshot) {
        let follows = matches!(self.standby.machine.state(), State::Seeding | State::Following);
        if self.is_planted(Planted::AppliedBeforeWhole) && follows {
            self.standby.is_mixed = true;
        }
        if self.is_planted(Planted::HeldBeforeWhole) {
            self.standby_feeds(Event::CheckpointHeld(snapshot.number));
        }
    }

    /// Plays the operator: retries the failed step, or makes sure that the primary is off.
    pub(super) fn operator_retries(&mut self) {
        if self.standby.machine.state() == State::Unfenced && self.rng.percent(50) {
            self.fence();
            return self.standby_feeds(Event::Vouch);
        }
        self.standby_feeds(Event::Retry);
    }

    pub(super) fn crash_standby(&mut self) {
        if std::mem::replace(&mut self.standby.is_alive, false) {
            self.standby.guest = Guest::default();
            self.standby.is_open = false;
            self.peer_notices(Side::Primary);
        }
    }
}
