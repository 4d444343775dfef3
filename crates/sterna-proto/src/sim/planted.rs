//! Bugs planted on purpose, to prove that the simulator finds them.
//!
//! The machines themselves stay correct. A planted bug sits between a machine and its process. It
//! changes the events that the machine gets or the actions that it returns, as if the machine's
//! table had the bug.

use crate::destination::{self, Destination};
use crate::source::{self, Source};
use crate::{Status, destination::Action as D, source::Action as S};
use std::time::Duration;

/// A bug of one of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Planted {
    /// Destination: answers the PREPARE ping before everything is loaded.
    AcknowledgeBeforeLoad,
    /// Destination: answers the PREPARE ping before its hooks are acquired.
    AcknowledgeBeforeHooks,
    /// Destination: answers *never* while it may still commit.
    AnswerNeverThenCommit,
    /// Destination: answers *committed* while the start may still fail.
    AnswerCommittedBeforeStart,
    /// Destination: sends SHUT 0 before the guest was started.
    ShutBeforeStart,
    /// Destination: reports failure while its hooks are still acquired.
    ShutFailureBeforeHooksBack,
    /// Destination: starts the guest when the connection is lost in Prepared.
    CommitOnLoss,
    /// Destination: fails without giving its hooks back.
    KeepHooks,
    /// Destination: fails without resetting the memory.
    KeepMemory,
    /// Destination: waits for its source without giving its hooks back.
    SuspendWithHooks,
    /// Destination: accepts a session that has begun before.
    TakeStaleDial,
    /// Source: handles late events of a lost connection.
    HearLostConnection,
    /// Destination: starts the guest as soon as it is prepared.
    StartBeforeCommit,
    /// Destination, in postcopy: reports the start of the guest before it.
    SayStartedBeforeStart,
    /// Destination, in postcopy: confirms that it has all pages while some are
    /// missing.
    ShutWithPagesMissing,
    /// Destination, in postcopy: completes with pages missing when the connection is lost.
    CompleteWithPagesMissing,
    /// Destination, in postcopy: answers *never* when the connection broke.
    AnswerNeverWhenPaused,
    /// Destination, in postcopy: returns a guest that it has reported as taken over.
    ///
    /// It does so when the start fails.
    DenyAfterIncomplete,
    /// Destination, on one host: returns the guest after its devices have written the memory.
    GiveBackWrittenMemory,
    /// Source: treats "incomplete" as "never".
    IncompleteMeansNever,
    /// Source, in postcopy: gives the guest's memory up when the connection
    /// breaks.
    ForgetPagesWhenPaused,
    /// Source, in postcopy: gives the guest's memory up when an operator decides that the
    /// destination has the guest.
    ForgetPagesWhenDecided,
    /// Destination, in a recovery: accepts a session that is older than one that it has seen.
    AcceptStaleSession,
    /// Destination, in a recovery: forgets a page that is in place, and places
    /// it again.
    ForgetPlacedPage,
    /// Source, in postcopy: treats an operator's pause as a lost connection, and reconnects.
    ConnectAgainAfterPause,
    /// Source, in a recovery: assumes that every page that it sent has arrived.
    DropLostPages,
    /// Source, in postcopy: resumes the guest when the connection breaks before the reported start.
    ResumeAfterRun,
    /// Source: resumes the guest when the connection is lost after EOF.
    ResumeAfterCommit,
    /// Source: resumes the guest when SHUT does not arrive in time.
    ResumeAfterSilence,
    /// Source: sends its configuration twice.
    ConfigureTwice,
    /// Source: cancels after EOF.
    CancelAfterCommit,
    /// Source: treats "unknown migration" as "never".
    UnknownMeansNever,
    /// Source: treats "pending" as "never".
    PendingMeansNever,
    /// Source: sends EOF without waiting for the PONG.
    CommitWithoutPrepare,
    /// Source: resumes the guest twice.
    ResumeTwice,
    /// Source: resumes a guest that was paused before the migration.
    ResumePaused,
    /// Source: resumes the guest before the hooks are re-acquired.
    ResumeBeforeHooks,
    /// Source: forgets to stop dirty tracking when it fails.
    ForgetTracking,
    /// Source: forgets to resume the guest when a stop ends after the cancel.
    ForgetLateStop,
}

impl Planted {
    /// Every planted bug, in the order of the type.
    pub const ALL: [Self; 39] = [
        Self::AcknowledgeBeforeLoad,
        Self::AcknowledgeBeforeHooks,
        Self::AnswerNeverThenCommit,
        Self::AnswerCommittedBeforeStart,
        Self::ShutBeforeStart,
        Self::ShutFailureBeforeHooksBack,
        Self::CommitOnLoss,
        Self::KeepHooks,
        Self::KeepMemory,
        Self::SuspendWithHooks,
        Self::TakeStaleDial,
        Self::HearLostConnection,
        Self::StartBeforeCommit,
        Self::SayStartedBeforeStart,
        Self::ShutWithPagesMissing,
        Self::CompleteWithPagesMissing,
        Self::AnswerNeverWhenPaused,
        Self::DenyAfterIncomplete,
        Self::GiveBackWrittenMemory,
        Self::IncompleteMeansNever,
        Self::ForgetPagesWhenPaused,
        Self::ForgetPagesWhenDecided,
        Self::AcceptStaleSession,
        Self::ForgetPlacedPage,
        Self::ConnectAgainAfterPause,
        Self::DropLostPages,
        Self::ResumeAfterRun,
        Self::ResumeAfterCommit,
        Self::ResumeAfterSilence,
        Self::ConfigureTwice,
        Self::CancelAfterCommit,
        Self::UnknownMeansNever,
        Self::PendingMeansNever,
        Self::CommitWithoutPrepare,
        Self::ResumeTwice,
        Self::ResumePaused,
        Self::ResumeBeforeHooks,
        Self::ForgetTracking,
        Self::ForgetLateStop,
    ];

    /// Feeds an event to the source with the bug, and returns the source's actions.
    pub(super) fn source(
        self,
        machine: &mut Source,
        now: Duration,
        event: source::Event,
    ) -> Result<Vec<S>, source::Refusal> {
        let event = self.told_source(machine, now, event);
        if self == Self::ForgetPagesWhenPaused
            && event == source::Event::ConnectionLost
            && machine.state() == source::State::Postcopy
        {
            machine.handle(now, source::Event::PagesSent)?;
            return machine.handle(now, source::Event::Shut(0));
        }
        let decides = source::Event::OperatorDecides(source::Decision::DestinationRuns);
        if self == Self::ForgetPagesWhenDecided
            && (event, machine.state()) == (decides, source::State::Undecided)
            && machine.is_postcopy()
        {
            machine.handle(now, event)?;
        }
        let mut actions = machine.handle(now, event)?;
        let undoes = matches!(machine.state(), source::State::Cancelling | source::State::Failing);
        match self {
            Self::CommitWithoutPrepare if remove(&mut actions, S::SendPrepare) => {
                actions.extend(machine.handle(now, source::Event::PrepareAcknowledged)?);
            }
            Self::ResumeTwice if actions.contains(&S::ResumeGuest) => actions.push(S::ResumeGuest),
            Self::ConfigureTwice if actions.contains(&S::Configure) => actions.push(S::Configure),
            Self::ResumeBeforeHooks if remove(&mut actions, S::ReacquireHooks) => {
                actions.extend(machine.handle(now, source::Event::HooksReacquired)?);
                actions.push(S::ReacquireHooks);
            }
            Self::ForgetTracking if undoes && remove(&mut actions, S::StopTracking) => {
                actions.extend(machine.handle(now, source::Event::TrackingStopped)?);
            }
            _ => {}
        }
        Ok(actions)
    }

    fn told_source(self, machine: &Source, now: Duration, event: source::Event) -> source::Event {
        use source::{Event as E, State};
        let state = machine.state();
        let is_committed = matches!(state, State::Committing | State::AwaitingAck);
        // SHUT 1, the declaration that the destination never runs the guest, makes a correct source
        // resume it.
        let never = E::Shut(1);
        match (self, event) {
            (Self::ResumeAfterCommit, E::ConnectionLost) if is_committed => never,
            (Self::ResumeAfterSilence, E::Tick)
                if is_committed && machine.deadline().is_some_and(|deadline| now >= deadline) =>
            {
                never
            }
            (Self::CancelAfterCommit, E::Cancel) if is_committed => never,
            (Self::ResumeAfterRun, E::ConnectionLost) if is_committed && machine.is_postcopy() => never,
            (Self::ConnectAgainAfterPause, E::PauseRequested) if state == State::Postcopy => {
                E::ConnectionLost
            }
            (Self::IncompleteMeansNever, E::AskAnswered(Status::Incomplete)) => E::AskAnswered(Status::Never),
            (Self::UnknownMeansNever, E::AskAnswered(Status::Unknown))
            | (Self::PendingMeansNever, E::AskAnswered(Status::Pending)) => E::AskAnswered(Status::Never),
            (Self::ResumePaused, E::GuestStopped { .. }) => E::GuestStopped { was_running: true },
            (Self::ForgetLateStop, E::GuestStopped { .. })
                if matches!(state, State::Cancelling | State::Failing) =>
            {
                E::GuestStopFailed
            }
            _ => event,
        }
    }

    /// Feeds an event to the destination with the bug, and returns the destination's actions.
    pub(super) fn destination(
        self,
        machine: &mut Destination,
        now: Duration,
        event: destination::Event,
    ) -> Result<Vec<D>, destination::Refusal> {
        use destination::{Event as E, State};
        let before = machine.state();
        if self == Self::StartBeforeCommit && event == E::GuestStarted && before != State::Committed {
            // The planted bug started the guest without a request, so the machine does not expect
            // this event.
            return Ok(Vec::new());
        }
        let event = match (self, before, event) {
            (Self::CommitOnLoss, State::Prepared, E::ConnectionLost) => E::EofRead,
            (Self::ShutWithPagesMissing, State::Postcopy, E::PagesFailed) => E::PagesComplete,
            (Self::CompleteWithPagesMissing, State::PostcopyPaused, E::ChannelsClosed) => E::PagesComplete,
            _ => event,
        };
        if self == Self::DenyAfterIncomplete && event == E::GuestStartFailed {
            machine.forget_what_it_said();
        }
        if self == Self::GiveBackWrittenMemory && event == E::MemoryMayChange {
            return Ok(Vec::new());
        }
        let mut actions = machine.handle(now, event)?;
        // The actions that the machine would return for this event afterwards.
        let next = |machine: &Destination, event| machine.clone().handle(now, event).unwrap_or_default();
        match self {
            Self::AcknowledgeBeforeLoad if event == E::PrepareRead && actions.contains(&D::FinishLoading) => {
                actions.insert(0, D::SendPong);
            }
            Self::AcknowledgeBeforeHooks
                if actions.contains(&D::AcquireHooks)
                    && next(machine, E::HooksAcquired).contains(&D::SendPong) =>
            {
                actions.insert(0, D::SendPong);
            }
            Self::AcknowledgeBeforeLoad | Self::AcknowledgeBeforeHooks => {
                remove(&mut actions, D::SendPong);
            }
            Self::StartBeforeCommit if actions.contains(&D::SendPong) => actions.push(D::StartGuest),
            Self::SayStartedBeforeStart if actions.contains(&D::StartGuest) => {
                let says = next(machine, E::GuestStarted).contains(&D::SayStarted);
                if says {
                    actions.insert(0, D::SayStarted);
                }
            }
            Self::AnswerNeverWhenPaused if before == State::PostcopyPaused => {
                answer_instead(&mut actions, Status::Incomplete, Status::Never);
            }
            Self::AnswerNeverThenCommit if before == State::Prepared => {
                answer_for_pending(&mut actions, Status::Never);
            }
            Self::AnswerCommittedBeforeStart if before == State::Committed => {
                answer_for_pending(&mut actions, Status::Committed);
            }
            Self::ShutBeforeStart
                if actions.contains(&D::StartGuest)
                    && next(machine, E::GuestStarted).contains(&D::SendShut(0)) =>
            {
                actions.insert(0, D::SendShut(0));
            }
            Self::ShutBeforeStart if event == E::GuestStarted => {
                remove(&mut actions, D::SendShut(0));
            }
            Self::ShutFailureBeforeHooksBack if actions.contains(&D::StopLoading) => {
                actions.insert(1, D::SendShut(1));
            }
            Self::SuspendWithHooks
                if machine.state() == State::Suspending && remove(&mut actions, D::GiveBackHooks) =>
            {
                actions.extend(machine.handle(now, E::HooksGivenBack)?);
            }
            Self::KeepHooks if remove(&mut actions, D::GiveBackHooks) => {
                actions.extend(machine.handle(now, E::HooksGivenBack)?);
            }
            Self::KeepMemory => {
                remove(&mut actions, D::ResetMemory);
            }
            _ => {}
        }
        Ok(actions)
    }
}

/// Removes an action; returns whether it was there.
fn remove<A: PartialEq>(actions: &mut Vec<A>, which: A) -> bool {
    let before = actions.len();
    actions.retain(|action| *action != which);
    actions.len() < before
}

fn answer_for_pending(actions: &mut [D], status: Status) {
    answer_instead(actions, Status::Pending, status);
}

fn answer_instead(actions: &mut [D], of: Status, status: Status) {
    for action in actions {
        if *action == D::Answer(of) {
            *action = D::Answer(status);
        }
    }
}
