//! An operator decides about a source that lost its acknowledgement in postcopy.

use std::time::Duration;

use sterna_proto::source::{
    Action as A, Cause, Config, Decision, Event as E, Peer, Refusal, Source, State as S,
};
use sterna_proto::{Limits, Status};

use super::postcopy::switching;

const NOW: Duration = Duration::ZERO;
const THERE: E = E::OperatorDecides(Decision::DestinationRuns);
const HERE: E = E::OperatorDecides(Decision::SourceRuns);

/// A source that has sent the order to start, and then lost its connection.
fn undecided(sterna: bool) -> Source {
    let committed: &[E] = if sterna { &[E::PrepareAcknowledged] } else { &[] };
    let machine = switching(sterna, &[committed, &[E::EofSent, E::ConnectionLost]].concat());
    assert_eq!(machine.state(), S::Undecided);
    machine
}

fn decided(sterna: bool) -> Source {
    let mut machine = undecided(sterna);
    machine.handle(NOW, THERE).expect("undecided");
    machine
}

#[test]
fn decision_for_the_destination_keeps_the_pages_and_permits_a_recovery() {
    for sterna in [true, false] {
        let mut machine = undecided(sterna);
        let mut tell = |event| machine.handle(NOW, event);
        let paused = A::ReportPaused(Cause::ConnectionLost);
        let wanted = if sterna { vec![paused, A::AskAgain] } else { vec![paused] };
        assert_eq!(tell(THERE), Ok(wanted));
        // The channels of the lost connection may still be closing.
        assert_eq!(tell(E::ResumeRequested), Ok(vec![]));
        assert_eq!(tell(E::ChannelsClosed), Ok(vec![A::Recover]));
        assert_eq!(tell(E::ResumeAcknowledged), Ok(vec![A::SendPages]));
        assert_eq!(tell(E::PagesSent), Ok(vec![]));
        assert!(matches!(
            tell(E::Shut(0)).expect("due")[..],
            [A::CloseChannels, A::StopTracking, A::Finish(_)]
        ));
        assert_eq!(machine.state(), S::Completed);
    }
}

#[test]
fn second_decision_for_the_destination_gives_up_the_pages() {
    for between in [&[][..], &[E::AskFailed], &[E::ChannelsClosed, E::ResumeRequested]] {
        let mut machine = decided(true);
        for event in between {
            machine.handle(NOW, *event).expect("not refused");
        }
        let given_up = machine.handle(NOW, THERE).expect("a decision about the pages");
        assert!(matches!(given_up[..], [A::CloseChannels, A::StopTracking, A::Finish(_)]), "{between:?}");
        assert_eq!(machine.state(), S::Completed);
    }
}

#[test]
fn guest_does_not_return_after_a_decision_for_the_destination() {
    let mut machine = decided(true);
    assert_eq!(machine.handle(NOW, HERE), Err(Refusal::RanElsewhere));
    assert_eq!(machine.handle(NOW, E::Cancel), Err(Refusal::CancelPaused { state: S::PostcopyPaused }));
    // The operator may have started the guest elsewhere, so a late *never* does not start it here.
    for late in [
        E::AskAnswered(Status::Never),
        E::AskAnswered(Status::Pending),
        E::AskAnswered(Status::Incomplete),
        E::AskFailed,
        E::Shut(1),
        E::Shut(0),
        E::DestinationStarted,
        E::ConnectionLost,
        E::EofFailed,
    ] {
        let mut machine = decided(true);
        assert_eq!(machine.handle(NOW, late), Ok(vec![]), "{late:?}");
        assert_eq!(machine.state(), S::PostcopyPaused, "{late:?}");
        assert!(!machine.may_guest_run());
    }
    // A destination that has every page has reported a fact.
    machine.handle(NOW, E::AskAnswered(Status::Committed)).expect("an answer");
    assert_eq!(machine.state(), S::Completed);
}

#[test]
fn decision_for_the_source_is_unchanged() {
    let mut machine = undecided(true);
    let undone = machine.handle(NOW, HERE).expect("undecided");
    assert_eq!(undone, [A::CloseChannels, A::ReacquireHooks]);
    assert_eq!(machine.failure(), Some(Cause::OperatorDecided));
}

#[test]
fn source_with_a_window_connects_by_itself_after_the_decision() {
    let second = Duration::from_secs(1);
    let limits = Limits { reconnect: 3 * second, reconnect_interval: second, ..Default::default() };
    let mut machine =
        Source::new(Config { return_path: true, postcopy: true, limits, ..Default::default() }, NOW);
    for event in [
        E::ChannelsReady,
        E::PeerIdentified(Peer { sterna: true, features: 0 }),
        E::PostcopyRequested { guest_running: true },
        E::GuestStopped { was_running: true },
        E::HooksReleased,
        E::FinalStateSent,
        E::PrepareAcknowledged,
        E::EofSent,
        E::ConnectionLost,
        E::ChannelsClosed,
        E::AskFailed,
    ] {
        machine.handle(NOW, event).expect("not refused");
    }
    // The window begins with the decision, however long the operator needed.
    let mut tell = |at: u32, event| machine.handle(second * at, event).expect("not refused");
    assert_eq!(tell(100, THERE), [A::ReportPaused(Cause::ConnectionLost), A::AskAgain]);
    tell(100, E::AskFailed);
    assert_eq!(tell(101, E::Tick), [A::Recover]);
    tell(101, E::ConnectionLost);
    tell(101, E::ChannelsClosed);
    tell(101, E::AskFailed);
    let given_up = [A::ReportPaused(Cause::TimedOut(S::PostcopyPaused)), A::AskAgain];
    assert_eq!(tell(103, E::Tick), given_up);
    assert_eq!(tell(103, E::ResumeRequested), [A::Recover]);
}
