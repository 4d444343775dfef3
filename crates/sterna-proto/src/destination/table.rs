//! Every transition of the destination, in one table.

use super::{Action as A, Cause, Destination, Event as E, Held, Hooks, Outcome, Refusal, State as S};
use std::time::Duration;

type Step = Result<Vec<A>, Refusal>;

/// Nothing changes, and nothing is to be done.
const IGNORE: Step = Ok(Vec::new());

impl Destination {
    /// The table: (state, event) → next state and actions. Rows are read from
    /// the top; the first that fits counts.
    pub(super) fn step(&mut self, now: Duration, event: E) -> Step {
        let event = match (self.state, event) {
            // Only a held guest makes a difference.
            (state, E::Discard) if state != S::Held => E::Abandon,
            _ => event,
        };
        match (self.state, event) {
            // Only a source that has committed asks: it does not come back.
            (S::Suspending | S::Suspended, E::StatusAsked(id)) if self.id == Some(id) => {
                let answer = A::Answer(self.status(id));
                let actions = self.fail(now, Cause::NotResumed)?;
                Ok([vec![answer], actions].concat())
            }
            (_, E::StatusAsked(id)) => Ok(vec![A::Answer(self.status(id))]),

            // The way forward.
            (S::Setup, E::ChannelsReady) => self.go(now, S::Active, &[]),
            // QEMU ignores a second one too (spec §1.8).
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
            // Only a source that is no Sterna ends without preparing.
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
            // Only a source that is no Sterna lets the guest run without preparing.
            (S::Active, E::RunRead) if self.id.is_none() && self.return_path => {
                self.postcopy.is_on = true;
                self.go(now, S::Completing, &[A::FinishLoading])
            }
            (S::Committed, E::GuestStarted) => self.started(now),
            (S::Held, E::OperatorCont) => self.cont(now),

            // Behind RUN.
            (s, e)
                if self.postcopy.is_on && is_from_channels(e) && s >= S::Completing && s <= S::Committed =>
            {
                self.before_the_start(now, e)
            }
            (S::Postcopy, E::EofRead) if !self.postcopy.has_ended => {
                self.postcopy.has_ended = true;
                Ok(vec![A::FinishPages])
            }
            // A fact, whatever became of the connection that brought the last one.
            (S::Postcopy | S::PostcopyPaused | S::PostcopyRecover, E::PagesComplete) => self.has_all(now),
            // The source knows better than this side that these channels are lost.
            (S::Postcopy | S::PostcopyRecover, E::Superseded | E::PauseRequested) => self.pause(now),
            (state, E::PauseRequested) => Err(Refusal::NotPostcopyActive { state }),
            // All that came is in place: what is missing is known.
            (S::PostcopyPaused, E::ChannelsClosed) => {
                self.postcopy.is_closed = true;
                Ok(vec![A::ReportHeld(Held::Pages)])
            }
            (S::PostcopyPaused, E::RecoveryBegun) if self.postcopy.is_closed => {
                self.go(now, S::PostcopyRecover, &[A::Recover])
            }
            (state, E::RecoveryBegun) => Err(Refusal::NotPostcopyPaused { state }),
            (S::PostcopyRecover, E::ResumeRead) => {
                self.postcopy.has_ended = false;
                self.go(now, S::Postcopy, &[A::SayResumed])
            }
            (S::PostcopyRecover, E::Tick) if self.is_due(now) => self.pause(now),
            (S::PostcopyRecover, e) if is_from_channels(e) => self.pause(now),
            // Whether something is missing is known when all that came is in place.
            (S::Postcopy, e) if is_from_channels(e) && self.postcopy.has_ended => IGNORE,
            (S::Postcopy, E::PagesFailed) => self.pause(now),
            (S::Postcopy, e) if is_from_channels(e) => self.pause(now),
            (S::PostcopyPaused | S::PostcopyRecover, E::Abandon | E::Discard) => Err(Refusal::LacksPages),
            (S::PostcopyPaused | S::PostcopyRecover, E::PagesFailed) => IGNORE,
            (S::PostcopyPaused, e) if is_from_channels(e) => IGNORE,
            // Of a connection that is over.
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
            (S::Committed, E::GuestStartFailed) => self.fail(now, Cause::GuestStart),
            (S::Held, E::Discard) => self.fail(now, Cause::Abandoned),
            (S::Held, E::Abandon) => Err(Refusal::MayBeOnlyCopy),
            // All is here: the channels have nothing more to say.
            (_, e) if is_from_channels(e) && self.is_only_copy() => IGNORE,
            (S::Committed | S::Held, e) if is_from_channels(e) => IGNORE,
            // A source without return path closes when it has sent all.
            (S::Completing, E::ConnectionLost) if self.ended && !self.return_path => IGNORE,

            // A lost connection, where another one will do.
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

            // Failures before EOF, or before all is loaded: the source runs on.
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

            // The way back.
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

            // What an operator may not do now.
            (S::Failing, E::Abandon) => IGNORE,
            (S::Failed, E::Abandon) => Err(Refusal::NothingToAbandon),
            (state, E::Abandon) => Err(Refusal::AbandonAfterCommit { state }),
            (state, E::OperatorCont) => Err(Refusal::NotHeld { state }),

            // Too early, or too late to matter.
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

    /// Everything is here, the source has completed or believes so, and no
    /// failure can be told to it any more.
    fn is_only_copy(&self) -> bool {
        self.committed || (self.state >= S::Preparing && !self.return_path)
    }

    fn acquire(&mut self, now: Duration) -> Step {
        self.hooks = Hooks::Acquiring;
        self.go(now, S::Preparing, &[A::AcquireHooks])
    }

    fn acquired(&mut self, now: Duration) -> Step {
        self.hooks = Hooks::Held;
        if self.prepares {
            return self.go(now, S::Prepared, &[A::SendPong]);
        }
        if self.conts {
            return self.start(now);
        }
        // In postcopy its source cannot complete before the guest runs, and never runs it again.
        if self.config.managed && self.run && !self.postcopy.is_on {
            // A QEMU source completes only by SHUT 0; the guest is taken over
            // paused, so it is true.
            self.enter(now, S::Held);
            let mut actions = self.say_committed();
            actions.push(A::CloseChannels);
            actions.push(A::ReportHeld(Held::UntilSourceCompleted));
            return Ok(actions);
        }
        self.take_over(now)
    }

    /// EOF was read and everything is ready.
    fn take_over(&mut self, now: Duration) -> Step {
        if self.run && self.config.autostart {
            return self.start(now);
        }
        if self.postcopy.is_on {
            self.postcopy.is_paused = true;
            return self.gets_pages(now);
        }
        self.enter(now, S::Paused);
        let mut actions = self.say_committed();
        actions.extend([A::AnnounceNetwork, A::CloseChannels, A::Finish(Outcome::Paused)]);
        Ok(actions)
    }

    fn start(&mut self, now: Duration) -> Step {
        self.enter(now, S::Committed);
        Ok(vec![A::StartGuest])
    }

    fn started(&mut self, now: Duration) -> Step {
        if self.postcopy.is_on {
            return self.gets_pages(now);
        }
        self.enter(now, S::Running);
        // The source waits for SHUT; who announces may take its time.
        let was_committed = self.committed;
        let mut actions = self.say_committed();
        actions.push(A::AnnounceNetwork);
        if !was_committed {
            actions.push(A::CloseChannels);
        }
        actions.push(A::Finish(Outcome::Running));
        Ok(actions)
    }

    /// The guest is here, and its pages come.
    fn gets_pages(&mut self, now: Duration) -> Step {
        self.enter(now, S::Postcopy);
        let mut actions = vec![A::SayStarted, A::AnnounceNetwork];
        if self.postcopy.is_lost {
            self.enter(now, S::PostcopyPaused);
            actions.push(A::KeepWaiting);
        } else if self.postcopy.has_ended {
            actions.push(A::FinishPages);
        }
        Ok(actions)
    }

    /// RUN was read, and the guest was not started yet: what channels say counts when it is.
    fn before_the_start(&mut self, now: Duration, event: E) -> Step {
        match event {
            E::EofRead if !self.postcopy.has_ended => self.postcopy.has_ended = true,
            E::ConnectionLost if self.postcopy.has_ended => {}
            // What is loading, or being acquired, may need what does not come any more.
            _ if self.state < S::Committed => return self.fail(now, cause_of(event)),
            // Whether something is missing is known when all that came is in place.
            _ => self.postcopy.is_lost |= !self.postcopy.has_ended,
        }
        IGNORE
    }

    /// Every page is in place.
    fn has_all(&mut self, now: Duration) -> Step {
        let (state, outcome) = match self.postcopy.is_paused {
            true => (S::Paused, Outcome::Paused),
            false => (S::Running, Outcome::Running),
        };
        let hears = self.state == S::Postcopy;
        self.enter(now, state);
        let shut = self.say_committed();
        // Over a lost connection nobody hears it: the source asks.
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
        // After a failed acquisition some are missing; acquiring those that
        // are held already does nothing.
        self.acquire(now)
    }

    /// SHUT 0, once, if there is a return path to say it on.
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

    /// Adds the next step of a suspension, or the end of it.
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

    /// Adds the next step of the way back, or the end of it.
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

/// Events that a channel, or a thread that reads one, causes.
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

/// Why a migration fails after such an event.
fn cause_of(event: E) -> Cause {
    match event {
        E::ConnectionLost => Cause::ConnectionLost,
        E::LocalFailure => Cause::LocalFailure,
        _ => Cause::PeerMisbehaved,
    }
}
