//! Every transition of the destination, in one table.

use super::{Action as A, Cause, Destination, Event as E, Held, Hooks, Outcome, Refusal, State as S};
use crate::Status;
use std::time::Duration;

type Step = Result<Vec<A>, Refusal>;

/// The event is accepted, but the machine does not change and returns no action.
const IGNORE: Step = Ok(Vec::new());

impl Destination {
    /// The table: (state, event) → next state and actions.
    ///
    /// Rows are read from the top; the first row that matches is used.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let event = match (self.state, event) {
            // A discard differs from an abandon only if the guest is held.
            (state, E::Discard) if state != S::Held => E::Abandon,
            _ => event,
        };
        match (self.state, event) {
            // Only a source that has committed asks for the status. It does not reconnect.
            (S::Suspending | S::Suspended, E::StatusAsked(id)) if self.id == Some(id) => {
                let answer = A::Answer(self.status(id));
                let actions = self.fail(now, Cause::NotResumed)?;
                Ok([vec![answer], actions].concat())
            }
            // This source has closed its channels, and learns from the answer that this side has
            // the guest. A start that fails later must not contradict the answer.
            (S::Committed, E::StatusAsked(id)) if self.postcopy.is_starting && self.id == Some(id) => {
                self.postcopy.is_said = true;
                let actions = self.pause(now)?;
                Ok([actions, vec![A::Answer(self.status(id))]].concat())
            }
            (_, E::StatusAsked(id)) => {
                self.postcopy.is_said |= self.status(id) == Status::Incomplete;
                Ok(vec![A::Answer(self.status(id))])
            }

            // Progress without failures.
            (S::Setup, E::ChannelsReady) => self.go(now, S::Active, &[]),
            // QEMU ignores a second OPEN_RETURN_PATH too (spec §1.8).
            (S::Active, E::ReturnPathOpened) => {
                self.return_path = true;
                IGNORE
            }
            (S::Active, E::HandoverIdRead(id)) if self.id.is_none() && self.return_path => {
                self.id = Some(id);
                IGNORE
            }
            (S::Active, E::PrepareRead) if self.return_path => {
                self.prepares = true;
                self.go(now, S::Completing, &[A::FinishLoading])
            }
            // Only a source that is no Sterna sends EOF without a PREPARE ping.
            (S::Active, E::EofRead) if self.id.is_none() => {
                self.ended = true;
                self.go(now, S::Completing, &[A::FinishLoading])
            }
            (S::Completing, E::LoadComplete { run }) => {
                self.run = run;
                self.acquire(now)
            }
            (S::Preparing, E::HooksAcquired) => self.acquired(now),
            (S::Prepared, E::EofRead) => self.take_over(now),
            (S::Prepared, E::RunRead) => {
                self.postcopy.is_on = true;
                self.take_over(now)
            }
            // Only a source that is no Sterna sends RUN without a PREPARE ping.
            (S::Active, E::RunRead) if self.id.is_none() && self.return_path => {
                self.postcopy.is_on = true;
                self.go(now, S::Completing, &[A::FinishLoading])
            }
            (S::Committed, E::GuestStarted) => self.started(now),
            (S::Held, E::OperatorCont) => self.cont(now),

            // After RUN. The start, or the taking over, may block on a page, so no other action
            // waits for its end.
            (s, e)
                if self.postcopy.is_on && is_from_channels(e) && s >= S::Completing && s < S::Committed =>
            {
                self.before_the_start(now, e)
            }
            (s, E::EofRead) if self.gets_pages(s) && !self.postcopy.has_ended => {
                self.postcopy.has_ended = true;
                Ok(vec![A::FinishPages])
            }
            // A fact, even if the connection that delivered the last page is lost.
            (s, E::PagesComplete) if self.gets_pages(s) || self.lacks_pages() => self.has_all(now),
            (S::Postcopy | S::PostcopyPaused | S::PostcopyRecover, E::GuestStarted)
                if self.postcopy.is_starting =>
            {
                self.is_here(now)
            }
            (S::PostcopyPaused, E::GuestStartFailed)
                if self.postcopy.is_starting && !self.postcopy.is_said =>
            {
                self.fail(now, Cause::GuestStart)
            }
            // The source never runs this guest again. An operator can start it here.
            (S::Postcopy | S::PostcopyPaused | S::PostcopyRecover, E::GuestStartFailed)
                if self.postcopy.is_starting =>
            {
                self.postcopy.is_paused = true;
                Ok(vec![A::ReportHeld(Held::StartInPostcopy), A::TakeOverPaused])
            }
            // The source knows before this side that these channels are lost.
            (s, E::Superseded | E::PauseRequested) if self.gets_pages(s) || s == S::PostcopyRecover => {
                self.postcopy.is_said = true;
                self.pause(now)
            }
            (state, E::PauseRequested) => Err(Refusal::NotPostcopyActive { state }),
            // Every received page is in place, so the set of missing pages is known.
            (S::PostcopyPaused, E::ChannelsClosed) => {
                self.postcopy.is_closed = true;
                // If no page is missing, the start is about to end.
                let is_whole = self.postcopy.is_whole;
                Ok(if is_whole { Vec::new() } else { vec![A::ReportHeld(Held::Pages)] })
            }
            (S::PostcopyPaused, E::RecoveryBegun) if self.postcopy.is_closed => {
                self.postcopy.is_said = true;
                self.go(now, S::PostcopyRecover, &[A::Recover])
            }
            (state, E::RecoveryBegun) => Err(Refusal::NotPostcopyPaused { state }),
            (S::PostcopyRecover, E::ResumeRead) => {
                self.postcopy.has_ended = false;
                self.go(now, S::Postcopy, &[A::SayResumed])
            }
            (S::PostcopyRecover, E::Tick) if self.is_due(now) => self.pause(now),
            (S::PostcopyRecover, e) if is_from_channels(e) => self.pause(now),
            // The missing pages are known only after every received page is in place.
            (s, e) if is_from_channels(e) && self.gets_pages(s) && self.postcopy.has_ended => IGNORE,
            (s, E::PagesFailed) if self.gets_pages(s) => {
                self.postcopy.is_said = true;
                self.pause(now)
            }
            (s, e) if is_from_channels(e) && self.gets_pages(s) => {
                // The engine may report to the source that a page could not be placed.
                self.postcopy.is_said |= e == E::LocalFailure;
                self.pause(now)
            }
            (S::PostcopyPaused | S::PostcopyRecover, E::Abandon | E::Discard) => Err(Refusal::LacksPages),
            (S::PostcopyPaused | S::PostcopyRecover, E::PagesFailed) => IGNORE,
            (S::PostcopyPaused, e) if is_from_channels(e) => IGNORE,
            // Events of a connection that is over.
            (_, E::Superseded | E::ChannelsClosed) => IGNORE,

            // Failures after EOF.
            (S::Preparing, E::HookAcquireFailed) if self.is_only_copy() => {
                self.hooks = Hooks::Held;
                self.conts = false;
                self.go(now, S::Held, &[A::CloseChannels, A::ReportHeld(Held::Hooks)])
            }
            (S::Committed, E::GuestStartFailed) if self.is_only_copy() => {
                self.go(now, S::Held, &[A::CloseChannels, A::ReportHeld(Held::Start)])
            }
            (S::Committed, E::MemoryMayChange) => {
                self.may_have_written = true;
                IGNORE
            }
            (_, E::MemoryMayChange) => IGNORE,
            // Memory was written here, so the source must not run its guest on it. SHUT 0 prevents
            // that.
            (S::Committed, E::GuestStartFailed) if self.may_have_written => {
                self.enter(now, S::Held);
                let mut actions = self.say_committed();
                actions.extend([A::CloseChannels, A::ReportHeld(Held::Start)]);
                Ok(actions)
            }
            (S::Committed, E::GuestStartFailed) => self.fail(now, Cause::GuestStart),
            (S::Held, E::Discard) => self.fail(now, Cause::Abandoned),
            (S::Held, E::Abandon) => Err(Refusal::MayBeOnlyCopy),
            // Everything has been received, so no event of the channels matters.
            (_, e) if is_from_channels(e) && self.is_only_copy() => IGNORE,
            (S::Committed | S::Held, e) if is_from_channels(e) => IGNORE,
            // A source without return path closes its channels after the last byte.
            (S::Completing, E::ConnectionLost) if self.ended && !self.return_path => IGNORE,

            // A lost connection that another connection can replace.
            (S::Active, E::MayReconnect) => {
                self.reconnects = !self.config.limits.reconnect.is_zero() && self.return_path;
                IGNORE
            }
            (_, E::MayReconnect) => IGNORE,
            (S::Active, E::PostcopyBegins) => {
                self.reconnects = false;
                IGNORE
            }
            (_, E::PostcopyBegins) => IGNORE,
            (_, E::ConnectionLost) if self.would_suspend() => {
                self.enter(now, S::Suspending);
                Ok(self.next_suspension(now, vec![A::StopLoading]))
            }
            (S::Suspending, E::HooksAcquired | E::HookAcquireFailed) if self.hooks == Hooks::Acquiring => {
                self.hooks = Hooks::Held;
                Ok(self.next_suspension(now, Vec::new()))
            }
            (S::Suspending, E::HooksGivenBack) => {
                self.hooks = Hooks::None;
                Ok(self.next_suspension(now, Vec::new()))
            }
            (S::Suspending, E::HookGiveBackFailed) => {
                self.hooks = Hooks::Stuck;
                self.fail(now, Cause::LocalFailure)
            }
            (S::Suspended, E::Resumed) => {
                self.prepares = false;
                self.go(now, S::Active, &[])
            }
            (S::Suspended, E::Tick) if self.is_due(now) => self.fail(now, Cause::NotResumed),
            (S::Suspending | S::Suspended, E::LocalFailure) => self.fail(now, Cause::LocalFailure),
            (S::Suspending | S::Suspended, E::Abandon) => self.fail(now, Cause::Abandoned),
            (S::Suspending | S::Suspended, e) if is_from_channels(e) => IGNORE,
            (S::Suspending | S::Suspended, E::LoadComplete { .. }) => IGNORE,
            (s, E::SourceGaveUp) if s <= S::Suspended => self.fail(now, Cause::NotResumed),
            (_, E::SourceGaveUp) => IGNORE,

            // Failures before EOF, or before everything is loaded: the source resumes the guest.
            (s, E::ConnectionLost) if s <= S::Prepared => self.fail(now, Cause::ConnectionLost),
            (
                s,
                E::PeerMisbehaved
                | E::ReturnPathOpened
                | E::HandoverIdRead(_)
                | E::PrepareRead
                | E::RunRead
                | E::ResumeRead
                | E::EofRead,
            ) if s <= S::Prepared => self.fail(now, Cause::PeerMisbehaved),
            (s, E::LocalFailure) if s <= S::Prepared => self.fail(now, Cause::LocalFailure),
            (S::Preparing, E::HookAcquireFailed) => {
                self.hooks = Hooks::Held;
                self.fail(now, Cause::HookAcquire)
            }
            (s, E::Tick) if s <= S::Prepared && self.is_due(now) => self.fail(now, Cause::TimedOut(s)),
            (s, E::Abandon) if s <= S::Prepared && !self.is_only_copy() => self.fail(now, Cause::Abandoned),

            // Undoing: hooks are given back, then the memory is reset.
            (S::Failing, E::HooksAcquired | E::HookAcquireFailed) if self.hooks == Hooks::Acquiring => {
                self.hooks = Hooks::Held;
                self.next_undo(Vec::new())
            }
            (S::Failing, E::HooksGivenBack) if self.hooks == Hooks::GivingBack => {
                self.hooks = Hooks::None;
                self.next_undo(Vec::new())
            }
            (S::Failing, E::HookGiveBackFailed) if self.hooks == Hooks::GivingBack => {
                self.hooks = Hooks::Stuck;
                self.next_undo(Vec::new())
            }

            // Requests of an operator that are refused in the present state.
            (S::Failing, E::Abandon) => IGNORE,
            (S::Failed, E::Abandon) => Err(Refusal::NothingToAbandon),
            (state, E::Abandon) => Err(Refusal::AbandonAfterCommit { state }),
            (state, E::OperatorCont) => Err(Refusal::NotHeld { state }),

            // Too early or too late: these change nothing.
            (_, E::Tick) => IGNORE,
            (s, _) if s >= S::Running => IGNORE,
            (state, event) => Err(Refusal::OutOfOrder { state, event }),
        }
    }

    fn go(&mut self, now: Duration, state: S, actions: &[A]) -> Step {
        self.enter(now, state);
        Ok(actions.to_vec())
    }

    fn is_due(&self, now: Duration) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Whether this side has the only copy of the guest.
    ///
    /// That is so when everything is loaded and the source has completed or believes so. No failure
    /// can be reported to the source any more.
    fn is_only_copy(&self) -> bool {
        self.committed || (self.state >= S::Preparing && !self.return_path)
    }

    fn acquire(&mut self, now: Duration) -> Step {
        self.hooks = Hooks::Acquiring;
        self.go(now, S::Preparing, &[A::AcquireHooks])
    }

    fn acquired(&mut self, now: Duration) -> Step {
        self.hooks = Hooks::Held;
        if self.conts {
            return self.start(now);
        }
        if self.prepares {
            return self.go(now, S::Prepared, &[A::SendPong]);
        }
        // In postcopy, the source cannot complete before the guest runs here, and never runs it
        // again.
        if self.config.managed && self.run && !self.postcopy.is_on {
            // A QEMU source completes only on SHUT 0. SHUT 0 is true here, because the guest is
            // taken over paused.
            self.enter(now, S::Held);
            let mut actions = self.say_committed();
            actions.push(A::CloseChannels);
            actions.push(A::ReportHeld(Held::UntilSourceCompleted));
            return Ok(actions);
        }
        self.take_over(now)
    }

    /// Starts the guest, or takes it over paused. EOF or RUN was read, and the hooks are acquired.
    fn take_over(&mut self, now: Duration) -> Step {
        if self.run && self.config.autostart {
            return self.start(now);
        }
        if self.postcopy.is_on {
            self.postcopy.is_paused = true;
            self.postcopy.is_starting = true;
            return self.go(now, S::Committed, &[A::TakeOverPaused]);
        }
        self.enter(now, S::Paused);
        let mut actions = self.say_committed();
        actions.extend([A::AnnounceNetwork, A::CloseChannels, A::Finish(Outcome::Paused)]);
        Ok(actions)
    }

    fn start(&mut self, now: Duration) -> Step {
        self.postcopy.is_starting = self.postcopy.is_on;
        self.go(now, S::Committed, &[A::StartGuest])
    }

    fn started(&mut self, now: Duration) -> Step {
        if self.postcopy.is_on {
            self.enter(now, S::Postcopy);
            return self.is_here(now);
        }
        self.enter(now, S::Running);
        // The source waits for SHUT, and the network announcement may take long. Therefore SHUT is
        // sent first.
        let was_committed = self.committed;
        let mut actions = self.say_committed();
        actions.push(A::AnnounceNetwork);
        if !was_committed {
            actions.push(A::CloseChannels);
        }
        actions.push(A::Finish(Outcome::Running));
        Ok(actions)
    }

    /// Whether the channels deliver pages in this state.
    ///
    /// They do in postcopy, to a guest that runs or is being started.
    pub(super) fn gets_pages(&self, state: S) -> bool {
        state == S::Postcopy || state == S::Committed && self.postcopy.is_starting
    }

    /// Handles the end of the start, or of the taking over, of a postcopy guest.
    fn is_here(&mut self, now: Duration) -> Step {
        self.postcopy.is_starting = false;
        let mut actions = vec![A::SayStarted, A::AnnounceNetwork];
        if self.postcopy.is_whole {
            actions.extend(self.has_all(now)?);
        }
        Ok(actions)
    }

    /// Handles an event of the channels after RUN and before the start.
    fn before_the_start(&mut self, now: Duration, event: E) -> Step {
        match event {
            E::EofRead if !self.postcopy.has_ended => self.postcopy.has_ended = true,
            E::ConnectionLost if self.postcopy.has_ended => {}
            // The loaders or the hooks may need data that does not arrive any more.
            _ => return self.fail(now, cause_of(event)),
        }
        IGNORE
    }

    /// Handles the arrival of the last page.
    fn has_all(&mut self, now: Duration) -> Step {
        if self.postcopy.is_starting {
            // No missing page can block the start any more.
            self.postcopy.is_whole = true;
            return IGNORE;
        }
        let (state, outcome) = match self.postcopy.is_paused {
            true => (S::Paused, Outcome::Paused),
            false => (S::Running, Outcome::Running),
        };
        let hears = self.state == S::Postcopy;
        self.enter(now, state);
        let shut = self.say_committed();
        // The source cannot receive SHUT over a lost connection. It asks for the status instead.
        let mut actions = if hears { shut } else { Vec::new() };
        actions.extend([A::CloseChannels, A::Finish(outcome)]);
        Ok(actions)
    }

    fn pause(&mut self, now: Duration) -> Step {
        self.postcopy.is_closed = false;
        self.go(now, S::PostcopyPaused, &[A::KeepWaiting])
    }

    fn cont(&mut self, now: Duration) -> Step {
        self.conts = true;
        // After a failed acquisition some hooks are missing. Acquiring a hook that is acquired
        // already does nothing.
        self.acquire(now)
    }

    /// Sends SHUT 0 once, if there is a return path.
    fn say_committed(&mut self) -> Vec<A> {
        let says = self.return_path && !self.committed;
        self.committed = true;
        if says { vec![A::SendShut(0)] } else { Vec::new() }
    }

    fn fail(&mut self, now: Duration, cause: Cause) -> Step {
        self.cause = Some(cause);
        self.enter(now, S::Failing);
        self.next_undo(vec![A::StopLoading])
    }

    /// Adds the next step of a suspension, or its end.
    fn next_suspension(&mut self, now: Duration, mut actions: Vec<A>) -> Vec<A> {
        match self.hooks {
            Hooks::Acquiring | Hooks::GivingBack => {}
            Hooks::Held => {
                self.hooks = Hooks::GivingBack;
                actions.push(A::GiveBackHooks);
            }
            Hooks::None | Hooks::Stuck => {
                self.enter(now, S::Suspended);
                actions.push(A::Suspend);
            }
        }
        actions
    }

    /// Adds the next step of the undoing, or the end of the migration.
    fn next_undo(&mut self, mut actions: Vec<A>) -> Step {
        match self.hooks {
            Hooks::Acquiring | Hooks::GivingBack => return Ok(actions),
            Hooks::Held => {
                self.hooks = Hooks::GivingBack;
                actions.push(A::GiveBackHooks);
                return Ok(actions);
            }
            Hooks::None | Hooks::Stuck => {}
        }
        self.state = S::Failed;
        if self.return_path && !self.committed {
            actions.push(A::SendShut(1));
        }
        actions.push(A::CloseChannels);
        actions.push(A::ResetMemory);
        actions.push(A::Finish(Outcome::Failed {
            cause: self.cause.unwrap_or(Cause::LocalFailure),
            hooks_left_held: self.hooks == Hooks::Stuck,
        }));
        Ok(actions)
    }
}

/// Events that a channel, or a thread that reads a channel, causes.
fn is_from_channels(event: E) -> bool {
    matches!(
        event,
        E::ConnectionLost
            | E::PeerMisbehaved
            | E::LocalFailure
            | E::ReturnPathOpened
            | E::HandoverIdRead(_)
            | E::PrepareRead
            | E::RunRead
            | E::ResumeRead
            | E::EofRead
    )
}

/// The cause with which the migration fails after such an event.
fn cause_of(event: E) -> Cause {
    match event {
        E::ConnectionLost => Cause::ConnectionLost,
        E::LocalFailure => Cause::LocalFailure,
        _ => Cause::PeerMisbehaved,
    }
}
