//! The source's process: performs the machine's actions as an engine would.

use super::schedule::{Effect, Pairing, Place};
use super::world::{Command, Item, Message, Owner, SECOND, Side, Work, World, time};
use crate::Status;
use crate::destination;
use crate::source::{Action, Decision, Event, Peer, Refusal, State};

impl World<'_> {
    /// Feeds an event to the machine and performs the returned actions.
    pub(super) fn source_event(&mut self, event: Event) {
        if !self.source.alive {
            return;
        }
        let now = time(self.now);
        let Some(machine) = &mut self.source.machine else {
            return;
        };
        let before = machine.state();
        let result = match self.schedule.planted {
            None => machine.handle(now, event),
            Some(bug) => bug.source(machine, now, event),
        };
        let after = machine.state();
        self.note(|| format!("  source {before:?} + {event:?} -> {after:?} {result:?}"));
        if before != after {
            self.entered(Place::Source(after));
        }
        match result {
            Ok(actions) => actions.into_iter().for_each(|a| self.source_performs(a)),
            Err(Refusal::OutOfOrder { .. }) => {
                self.violate("model: the source's machine was fed out of order");
            }
            Err(Refusal::AcknowledgementsMissing { .. }) => {
                let at = SECOND / 10 + self.local_delay();
                self.push(at, Item::SourceDoes(Work::WantSwitchover));
            }
            Err(_) => {}
        }
        if before != after && after == State::PreSwitchover {
            let at = self.rng.below(2 * SECOND);
            self.push(at, Item::Operator(Command::Continue));
        }
    }

    fn source_performs(&mut self, action: Action) {
        let work = match action {
            Action::Identify => {
                self.send(Side::Destination, Message::OpenReturnPath);
                self.send(Side::Destination, Message::Hello);
                return;
            }
            Action::Configure => return self.send(Side::Destination, Message::Configuration),
            Action::SendHandoverId => {
                self.send(Side::Destination, Message::HandoverId);
                if self.schedule.reconnects {
                    self.send(Side::Destination, Message::Reconnects);
                }
                return;
            }
            Action::Compare => return self.send(Side::Destination, Message::Compatibility),
            Action::Reconnect => return self.dial(),
            Action::StartPrecopy | Action::ResumePrecopy => {
                if action == Action::ResumePrecopy {
                    self.send(Side::Destination, Message::OpenReturnPath);
                }
                self.facts.tracking = true;
                for _ in 0..2 {
                    self.send(Side::Destination, Message::Ram);
                }
                for _ in 0..self.schedule.asks {
                    let at = self.local_delay();
                    self.push(at, Item::SourceDoes(Work::DeviceAsks));
                }
                // Usually after the devices' requests for an acknowledgement.
                let at = self.local_delay();
                self.push(at + 2_000, Item::SourceDoes(Work::WantSwitchover));
                return;
            }
            Action::StopGuest => Work::Do(Effect::Stop),
            Action::ReleaseHooks => Work::Do(Effect::Release),
            Action::SendFinalState => Work::Final(self.dials.session()),
            Action::SendPrepare => {
                self.lost_connection_comes_back();
                return self.send(Side::Destination, Message::Prepare);
            }
            Action::SendEof => Work::EofByte,
            Action::SendRun => Work::RunByte,
            Action::SendPages => Work::Pages,
            // Only a protection takes checkpoints.
            Action::TakeCheckpoints => return,
            Action::ReportUndecided(_) | Action::ReportPaused(_) => {
                let is_paused = matches!(action, Action::ReportPaused(_));
                if is_paused && self.schedule.resumes && self.source.retries < 4 {
                    self.source.retries += 1;
                    let at = self.rng.below(6 * SECOND);
                    self.push(at, Item::Operator(Command::Resume));
                }
                if self.schedule.operator_decides {
                    self.push(40 * SECOND, Item::Operator(Command::Decide));
                }
                return;
            }
            Action::AskAgain => {
                let delay = self.network_delay();
                return self.push(delay, Item::QuestionArrives);
            }
            Action::BreakOff => return self.close(Side::Source),
            Action::CloseChannels => {
                self.close(Side::Source);
                Work::Closed
            }
            Action::Recover => return self.source_dials(),
            Action::ReacquireHooks => Work::Do(Effect::Reacquire),
            Action::ResumeGuest => Work::Do(Effect::Resume),
            Action::StopTracking => Work::Do(Effect::Untrack),
            Action::Finish(outcome) => {
                self.facts.source_outcome = Some(outcome);
                self.check_source_outcome(outcome);
                let held = self.source_state() == Some(State::Held);
                if held && self.source.retries < 2 {
                    self.source.retries += 1;
                    self.push(5 * SECOND, Item::Operator(Command::Retry));
                }
                return;
            }
        };
        let at = self.local_delay();
        self.push(at, Item::SourceDoes(work));
    }

    /// Handles the end of local work at the source.
    pub(super) fn source_does(&mut self, work: Work) {
        match work {
            Work::Connect => {
                self.send(Side::Destination, Message::Connected);
                if self.source.machine.is_none() {
                    return self.qemu_source_connects();
                }
                self.source_event(Event::ChannelsReady);
            }
            Work::DeviceAsks if self.source_state() == Some(State::Active) => {
                self.source_event(Event::DeviceAsksAck);
                if self.schedule.ack == crate::source::SwitchoverAck::Modern {
                    self.send(Side::Destination, Message::DeviceAsks);
                }
            }
            Work::WantSwitchover if self.source_state() == Some(State::Active) => {
                let guest_running = self.source.running;
                self.source_event(match self.schedule.postcopy {
                    true => Event::PostcopyRequested { guest_running },
                    false => Event::SwitchoverRequested { guest_running },
                });
            }
            // An engine that closes its channels drops the data that it was sending.
            Work::Final(session) if self.source.open && session == self.dials.session() => {
                self.send(Side::Destination, Message::Final);
                self.source_event(Event::FinalStateSent);
            }
            Work::EofByte | Work::RunByte if self.source.open => {
                let commit = if work == Work::EofByte { Message::Eof } else { Message::Run };
                // Either no byte is sent, or one byte and an error, or all bytes.
                if !self.fails(Effect::SendEof) {
                    self.commit_goes_out(commit);
                    let at = self.local_delay();
                    return self.push(at, Item::SourceDoes(Work::EofDone));
                }
                if self.rng.percent(50) {
                    self.commit_goes_out(commit);
                }
                self.source_event(Event::EofFailed);
            }
            Work::Pages if self.source.open && self.source_state() == Some(State::Postcopy) => {
                for bit in 0..4 {
                    if self.facts.sent & (1 << bit) == 0 {
                        self.facts.sent |= 1 << bit;
                        self.send(Side::Destination, Message::Page(1 << bit));
                    }
                }
                self.source_event(Event::PagesSent);
                self.facts.pages_out = true;
                if self.fails(Effect::SendEnd) {
                    return self.loses_end();
                }
                self.send(Side::Destination, Message::Eof);
            }
            Work::EofDone if self.source.open => self.source_event(Event::EofSent),
            Work::Closed => {
                // No event of these channels is fed any more.
                self.back.generation += u32::from(!self.source.open);
                self.source_event(Event::ChannelsClosed);
            }
            Work::Do(effect) => self.source_effect(effect),
            Work::QemuStops | Work::QemuReleases | Work::QemuEof | Work::QemuResumes => {
                self.qemu_source_does(work);
            }
            _ => {}
        }
    }

    pub(super) fn eof_goes_out(&mut self) {
        self.commit_goes_out(Message::Eof);
    }

    fn commit_goes_out(&mut self, commit: Message) {
        let is_run = commit == Message::Run;
        let prepares = self.schedule.pairing == Pairing::Sternas
            || !is_run && self.schedule.pairing == Pairing::ToQemu { return_path: true };
        if prepares && !self.facts.prepared {
            self.violate("invariant 1: the commit went out before the destination was prepared");
        }
        *(if is_run { &mut self.facts.run_out } else { &mut self.facts.eof_out }) = true;
        self.send(Side::Destination, commit);
    }

    fn source_effect(&mut self, effect: Effect) {
        let fails = self.fails(effect);
        let event = match effect {
            Effect::Stop if fails => Event::GuestStopFailed,
            Effect::Stop => {
                Event::GuestStopped { was_running: std::mem::replace(&mut self.source.running, false) }
            }
            Effect::Release => {
                let count = if fails { self.rng.below(2) as usize } else { 2 };
                self.hooks[..count].fill(Owner::Nobody);
                if fails { Event::HookReleaseFailed } else { Event::HooksReleased }
            }
            Effect::Reacquire => self.source_reacquires(fails),
            Effect::Resume if fails => Event::GuestResumeFailed,
            Effect::Resume => {
                self.source_resumes();
                Event::GuestResumed
            }
            Effect::Untrack if fails => Event::TrackingStopFailed,
            Effect::Untrack => {
                self.facts.tracking = false;
                Event::TrackingStopped
            }
            _ => return,
        };
        self.source_event(event);
    }

    fn source_reacquires(&mut self, fails: bool) -> Event {
        for index in (0..self.hooks.len()).rev() {
            let taken = self.schedule.locks && self.hooks[index] == Owner::Destination;
            if taken || (fails && index == 0) {
                return Event::HooksReacquireFailed;
            }
            self.hooks[index] = Owner::Source;
        }
        Event::HooksReacquired
    }

    fn source_resumes(&mut self) {
        if self.source.running {
            self.violate("invariant 3: the source's guest was resumed twice");
        }
        if !self.schedule.was_running {
            self.violate("invariant 3: a guest that was paused before was resumed");
        }
        if !self.holds_all(Owner::Source) {
            self.violate("invariant 1: the source's guest resumed without all its hooks");
        }
        let decided = self.facts.decided == Some(Decision::SourceRuns);
        let committed = self.facts.eof_out || self.facts.run_out;
        if committed && !self.facts.never && !decided {
            self.violate("invariant 1: the source resumed after the commit");
        }
        if self.facts.written && !decided {
            self.violate("invariant 2: the source resumed on memory that the destination has written");
        }
        if self.schedule.postcopy && self.facts.taken_over {
            self.violate("invariant 1: the source resumed a guest that has run at the destination");
        }
        self.source.running = true;
    }

    /// Handles a message that arrives from the destination.
    pub(super) fn source_reads(&mut self, message: Message) {
        if self.source.machine.is_none() {
            return self.qemu_source_reads(message);
        }
        match message {
            Message::HelloPong { sterna } => {
                let features = u16::from(sterna);
                self.source_event(Event::PeerIdentified(Peer { sterna, features }));
            }
            Message::WantsConfiguration => self.source_event(Event::ConfigurationWanted),
            Message::Configured => self.source_event(Event::ConfigurationAccepted),
            Message::ReconnectsPong => self.source_event(Event::MayReconnect),
            Message::CompatibilityPong => self.source_event(Event::CompatibilityAccepted),
            Message::Ack => self.source_event(Event::SwitchoverAck),
            Message::Bitmap(bits) => self.hears_bitmap(bits),
            Message::ResumeAck => self.source_event(Event::ResumeAcknowledged),
            Message::Started => self.source_event(Event::DestinationStarted),
            Message::Wants(pages) => self.sends_requested(pages),
            Message::PreparePong => self.source_event(Event::PrepareAcknowledged),
            Message::Shut(code) => self.hears_shut(code),
            _ => self.source_event(Event::PeerMisbehaved),
        }
    }

    pub(super) fn source_broken(&mut self) {
        if self.source.machine.is_none() {
            return self.qemu_source_broken();
        }
        self.source_event(Event::ConnectionLost);
    }

    pub(super) fn source_local_failure(&mut self) {
        let settled = self.source_state().is_none_or(|s| s > State::Postcopy);
        if self.source.machine.is_some() && !settled {
            self.source_event(Event::LocalFailure);
        }
    }

    /// Plays the operator's cancel, and checks that it is refused exactly after the commit.
    pub(super) fn cancel(&mut self) {
        if self.source.machine.is_none() {
            return self.qemu_source_broken();
        }
        let before = self.source_state();
        self.source_event(Event::Cancel);
        let after = self.source_state();
        let committed = before.is_some_and(State::is_committed);
        if committed && before != after {
            self.violate("invariant 1: a cancel after the commit was accepted");
        }
        let early = before.is_some_and(|s| s < State::Committing);
        if early && self.source.alive && before == after {
            self.violate("invariant 3: a cancel before the commit was not accepted");
        }
    }

    pub(super) fn operator(&mut self, command: Command) {
        match command {
            Command::Continue => self.source_event(Event::OperatorContinue),
            Command::Retry => self.source_event(Event::OperatorRetry),
            Command::Decide => self.decide(),
            Command::Resume => {
                self.facts.told_to_wait = false;
                self.source_event(Event::ResumeRequested);
            }
            Command::Cont => self.destination_event(destination::Event::OperatorCont),
            Command::Abandon => {
                if self.destination.machine.is_some() && self.destination.alive {
                    self.facts.abandoned = true;
                    self.destination_event(destination::Event::Discard);
                }
            }
        }
    }

    /// Plays an operator who looks at the destination before the decision.
    fn decide(&mut self) {
        let is_open = matches!(
            self.source_state(),
            Some(State::Undecided | State::PostcopyPaused | State::PostcopyRecover)
        );
        if !is_open || !self.source.alive {
            return;
        }
        // In postcopy the guest never returns to the source after it has run at the destination.
        let has_run = self.schedule.postcopy && self.facts.taken_over;
        // A decision for the destination is final, too.
        let is_given = self.facts.decided == Some(Decision::DestinationRuns);
        let is_there = self.destination.alive && (self.destination.running || self.facts.committed);
        let has_it = has_run || is_given || is_there;
        let decision = if has_it {
            Decision::DestinationRuns
        } else {
            self.crash(Side::Destination);
            Decision::SourceRuns
        };
        self.facts.decided = Some(decision);
        let is_paused = self.source_state() != Some(State::Undecided);
        self.facts.pages_given_up |= is_paused && decision == Decision::DestinationRuns;
        self.source_event(Event::OperatorDecides(decision));
    }

    /// Handles a status question that reaches the destination's address.
    pub(super) fn question(&mut self) {
        let blocked = !self.schedule.questions || self.now < self.asks_blocked_until || self.rng.percent(5);
        let to_qemu = matches!(self.schedule.pairing, Pairing::ToQemu { .. });
        let dead = !self.destination.alive && !self.facts.restarted;
        if blocked || to_qemu || dead {
            let at = self.network_delay();
            return self.push(at, Item::Answer(None));
        }
        if !self.destination.alive {
            let at = self.network_delay();
            return self.push(at, Item::Answer(Some(Status::Unknown)));
        }
        self.destination_event(destination::Event::StatusAsked(super::world::ID));
    }

    pub(super) fn answer(&mut self, status: Option<Status>) {
        if self.source_state().is_none() {
            return;
        }
        self.source_event(status.map_or(Event::AskFailed, Event::AskAnswered));
    }

    pub(super) fn source_state(&self) -> Option<State> {
        self.source.machine.as_ref().map(|machine| machine.state())
    }
}
