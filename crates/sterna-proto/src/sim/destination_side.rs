//! The destination's process: performs the machine's actions as an engine would, and checks the
//! preconditions of each action.

use super::recovery::ALL;
use super::schedule::{Effect, Pairing, Place};
use super::world::{Command, ID, Item, Message, Owner, SECOND, Side, Work, World, time};
use crate::Status;
use crate::destination::{Action, Event, Held, Refusal, State};
use crate::source::SwitchoverAck;

impl World<'_> {
    /// Feeds an event to the machine and performs the returned actions.
    pub(super) fn destination_event(&mut self, event: Event) {
        if !self.destination.alive {
            return;
        }
        let now = time(self.now);
        let Some(machine) = &mut self.destination.machine else {
            return;
        };
        let before = machine.state();
        let result = match self.schedule.planted {
            None => machine.handle(now, event),
            Some(bug) => bug.destination(machine, now, event),
        };
        let after = machine.state();
        self.note(|| format!("  destination {before:?} + {event:?} -> {after:?} {result:?}"));
        if before != after {
            self.entered(Place::Destination(after));
        }
        match result {
            Ok(actions) => actions.into_iter().for_each(|a| self.destination_performs(a)),
            Err(Refusal::OutOfOrder { .. }) => {
                self.violate("model: the destination's machine was fed out of order");
            }
            Err(_) => {}
        }
    }

    fn destination_performs(&mut self, action: Action) {
        let work = match action {
            Action::FinishLoading => Work::Load,
            Action::AcquireHooks => Work::Do(Effect::Acquire),
            Action::SendPong => {
                self.check_ready("the PREPARE ping was answered");
                self.facts.prepared = true;
                return self.send(Side::Source, Message::PreparePong);
            }
            Action::StartGuest => Work::Do(Effect::Start),
            Action::TakeOverPaused => Work::TakesOver,
            Action::AnnounceNetwork | Action::StopLoading => return,
            Action::SayStarted => {
                self.says_taken_over("the guest was said to be started");
                return self.send(Side::Source, Message::Started);
            }
            Action::FinishPages => Work::Pages,
            Action::KeepWaiting => {
                self.says_last_word();
                self.close(Side::Destination);
                Work::Closed
            }
            Action::Recover => {
                self.facts.last_word = false;
                return;
            }
            Action::SayResumed => return self.send(Side::Source, Message::ResumeAck),
            Action::SendShut(0) => {
                self.says_committed("SHUT 0 was said");
                return self.send(Side::Source, Message::Shut(0));
            }
            Action::SendShut(code) => {
                self.says_never("SHUT 1 was said");
                return self.send(Side::Source, Message::Shut(code));
            }
            Action::Answer(status) => {
                match status {
                    Status::Committed => self.says_committed("\"committed\" was answered"),
                    Status::Never => self.says_never("\"never\" was answered"),
                    Status::Incomplete => self.says_it_has_the_guest("\"incomplete\" was answered"),
                    Status::Pending | Status::Unknown => {}
                }
                let at = self.network_delay();
                return self.push(at, Item::Answer(Some(status)));
            }
            Action::ReportHeld(why) => return self.destination_held(why),
            Action::GiveBackHooks => Work::Do(Effect::GiveBack),
            Action::CloseChannels => return self.close(Side::Destination),
            Action::Suspend => {
                self.close(Side::Destination);
                return self.resume_pending();
            }
            Action::ResetMemory => {
                self.facts.memory_used = false;
                return;
            }
            Action::Finish(outcome) => {
                self.facts.destination_outcome = Some(outcome);
                return;
            }
        };
        let at = self.local_delay();
        self.push(at, Item::DestinationDoes(work));
    }

    pub(super) fn destination_does(&mut self, work: Work) {
        match work {
            Work::Load => {
                if self.destination_state() != Some(State::Completing) {
                    return; // StopLoading was performed before.
                }
                if self.fails(Effect::Load) || !self.facts.final_arrived {
                    return self.destination_event(Event::LocalFailure);
                }
                self.facts.loaded = true;
                let run = self.schedule.was_running;
                self.destination_event(Event::LoadComplete { run });
            }
            Work::Pages => {
                if self.facts.placed != ALL && !self.facts.page_lost {
                    // The stream keeps its order: everything that was sent before its end has
                    // arrived.
                    self.violate("invariant 2: the stream has ended, and a page was never sent");
                }
                if self.facts.placed != ALL {
                    return self.destination_event(Event::PagesFailed);
                }
                self.facts.pages_complete = true;
                self.destination_event(Event::PagesComplete);
            }
            Work::Closed => self.channels_are_closed(),
            // The guest, or its VMM, touches a page when it starts. The start is repeated until the
            // page is there.
            Work::Do(Effect::Start) if self.start_waits() => {
                self.push(SECOND / 2, Item::DestinationDoes(work))
            }
            Work::Do(effect) => self.destination_effect(effect),
            Work::TakesOver => {
                self.check_ready("the guest was taken over paused");
                self.facts.taken_over = true;
                self.destination_event(Event::GuestStarted);
            }
            Work::QemuStarts | Work::QemuPongs | Work::QemuRuns => self.qemu_destination_does(work),
            _ => {}
        }
    }

    fn destination_effect(&mut self, effect: Effect) {
        let fails = self.fails(effect);
        let event = match effect {
            Effect::Acquire => self.destination_acquires(fails),
            Effect::GiveBack => {
                let from = usize::from(fails);
                for hook in &mut self.hooks[from..] {
                    if *hook == Owner::Destination {
                        *hook = Owner::Nobody;
                    }
                }
                if fails {
                    self.facts.give_back_failed = true;
                    Event::HookGiveBackFailed
                } else {
                    Event::HooksGivenBack
                }
            }
            Effect::Start if fails => {
                if self.schedule.one_host {
                    // Devices run before the vCPUs, and may write memory.
                    self.destination_event(Event::MemoryMayChange);
                    self.facts.written = true;
                }
                Event::GuestStartFailed
            }
            Effect::Start => {
                self.check_ready("the guest was started");
                if self.destination.running {
                    self.violate("invariant 1: the destination's guest was started twice");
                }
                if self.facts.never {
                    self.violate("invariant 1: the destination started after it had said never");
                }
                if !self.facts.eof_out && !self.facts.run_out {
                    self.violate("invariant 1: the destination started before the commit");
                }
                self.destination.running = true;
                self.facts.taken_over = true;
                Event::GuestStarted
            }
            _ => return,
        };
        self.destination_event(event);
    }

    fn destination_acquires(&mut self, fails: bool) -> Event {
        for index in 0..self.hooks.len() {
            let taken = self.schedule.locks && self.hooks[index] == Owner::Source;
            if taken || (fails && index == 1) {
                return Event::HookAcquireFailed;
            }
            self.hooks[index] = Owner::Destination;
        }
        Event::HooksAcquired
    }

    /// Checks that everything is loaded and every hook is acquired.
    fn check_ready(&mut self, what: &str) {
        if !self.facts.loaded {
            self.violate(&format!("invariant 2: {what} before all was loaded"));
        }
        if !self.holds_all(Owner::Destination) {
            self.violate(&format!("invariant 1: {what} before all hooks were held"));
        }
    }

    /// Checks a report in postcopy that the guest was taken over.
    fn says_taken_over(&mut self, what: &str) {
        let machine = self.destination.machine.as_ref();
        let is_paused = machine.is_some_and(|machine| machine.is_taken_over_paused());
        if !self.destination.running && !is_paused {
            self.violate(&format!("invariant 1: {what} before the guest was started or taken over paused"));
        }
        self.says_it_has_the_guest(what);
    }

    /// Checks an answer that this side has the guest. The source never runs it from now on.
    fn says_it_has_the_guest(&mut self, what: &str) {
        self.check_ready(what);
        let machine = self.destination.machine.as_ref();
        let is_here = machine.is_some_and(|machine| machine.may_guest_run() || machine.starts_in_postcopy());
        if !is_here {
            self.violate(&format!("invariant 1: {what} before the guest was being started"));
        }
        self.facts.taken_over = true;
    }

    /// Whether the start blocks on a missing page. The page is requested; if the request is lost,
    /// the start stays blocked.
    fn start_waits(&mut self) -> bool {
        let wants = self.schedule.start_needs & !self.facts.placed;
        if wants == 0 || !self.facts.run_out {
            return false;
        }
        if self.destination.open {
            self.send(Side::Source, Message::Wants(wants));
        }
        true
    }

    fn says_committed(&mut self, what: &str) {
        if self.destination_state() != Some(State::Failed) {
            self.check_ready(what);
        }
        if self.facts.run_out && !self.facts.pages_complete {
            self.violate(&format!("invariant 2: {what} while pages were missing"));
        }
        // The operator has discarded the guest. The source must not run it on memory that was
        // written here.
        let is_gone = self.facts.written && self.destination_state() == Some(State::Failed);
        let paused = is_gone || matches!(self.destination_state(), Some(State::Paused | State::Held));
        if !self.destination.running && !paused {
            self.violate(&format!("invariant 1: {what} before the guest was started or taken over paused"));
        }
        self.facts.committed = true;
    }

    fn says_never(&mut self, what: &str) {
        let hooks = self.locks_some(Owner::Destination) && !self.facts.give_back_failed;
        if hooks {
            self.violate(&format!("invariant 3: {what} while hooks were still held"));
        }
        if self.destination.running {
            self.violate(&format!("invariant 1: {what} while the guest runs"));
        }
        if self.facts.written {
            self.violate(&format!("invariant 2: {what}, and the source's memory was written here"));
        }
        self.facts.never = true;
    }

    fn destination_held(&mut self, why: Held) {
        let managed = matches!(self.schedule.pairing, Pairing::FromQemu { managed: true, .. });
        // `sterna migrate` sends `cont` after it has seen the end of the source (qemu.rs).
        if why == Held::UntilSourceCompleted && managed {
            return self.tool_looks();
        }
        if self.destination.retries < 3 {
            self.destination.retries += 1;
            self.push(3 * SECOND, Item::Operator(Command::Cont));
        }
    }

    /// Handles a message that arrives from the source.
    pub(super) fn destination_reads(&mut self, message: Message) {
        if self.destination.machine.is_none() {
            return self.qemu_destination_reads(message);
        }
        if self.schedule.configures && !self.facts.has_vm {
            return self.reads_without_vm(message);
        }
        match message {
            Message::Configuration => self.violate("invariant 1: one migration made a second VM"),
            Message::Connected => self.destination_event(Event::ChannelsReady),
            Message::OpenReturnPath => {
                self.destination_event(Event::ReturnPathOpened);
                if self.schedule.ack == SwitchoverAck::Legacy {
                    self.send(Side::Source, Message::Ack);
                }
            }
            Message::Hello => self.send(Side::Source, Message::HelloPong { sterna: true }),
            Message::HandoverId => self.destination_event(Event::HandoverIdRead(ID)),
            Message::Reconnects => {
                self.destination_event(Event::MayReconnect);
                self.send(Side::Source, Message::ReconnectsPong);
            }
            Message::Compatibility => self.send(Side::Source, Message::CompatibilityPong),
            Message::DeviceAsks => self.send(Side::Source, Message::Ack),
            Message::Ram => {
                // Lanes that were stopped write no pages.
                self.facts.memory_used |= self.destination_state() == Some(State::Active);
            }
            Message::Final => {
                self.facts.final_arrived = true;
                if self.schedule.postcopy {
                    self.destination_event(Event::PostcopyBegins);
                }
            }
            Message::Prepare => self.destination_event(Event::PrepareRead),
            Message::Run => self.destination_event(Event::RunRead),
            Message::Page(page) => self.places(page),
            Message::AskBitmap => self.says_bitmap(),
            Message::Resume => self.destination_event(Event::ResumeRead),
            Message::Eof => self.destination_event(Event::EofRead),
            _ => self.destination_event(Event::PeerMisbehaved),
        }
    }

    /// Handles a message that arrives before there is a VM.
    fn reads_without_vm(&mut self, message: Message) {
        match message {
            Message::Connected | Message::OpenReturnPath => {}
            Message::Hello => self.send(Side::Source, Message::WantsConfiguration),
            Message::Configuration => {
                self.facts.has_vm = true;
                // The machine exists only from now on.
                self.destination_event(Event::ChannelsReady);
                self.send(Side::Source, Message::Configured);
            }
            _ => self.violate("invariant 2: a part of the guest was sent to a side without a VM"),
        }
    }

    pub(super) fn destination_broken(&mut self) {
        if self.destination.machine.is_none() {
            return self.qemu_destination_broken();
        }
        // A stream that ends inside an element looks like a violation of the format.
        if self.rng.percent(30) {
            return self.destination_event(Event::PeerMisbehaved);
        }
        self.destination_event(Event::ConnectionLost);
    }

    pub(super) fn destination_local_failure(&mut self) {
        if self.destination_state().is_some() {
            self.destination_event(Event::LocalFailure);
        }
    }

    pub(super) fn destination_state(&self) -> Option<State> {
        self.destination.machine.as_ref().map(|machine| machine.state())
    }
}
