//! Waits that reach their limit, and acknowledgements of the switchover.

use std::time::Duration;
use sterna_proto::source::{Action as A, Cause, Config, Event as E, Peer, Refusal, Source};
use sterna_proto::source::{State as S, SwitchoverAck};
use sterna_proto::{Limits, Status};

const GO: E = E::SwitchoverRequested { guest_running: true };

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A source that handled these events at time 0.
fn source(config: Config, sterna: bool, events: &[E]) -> Source {
    let mut machine = Source::new(config, at(0));
    let identified = E::PeerIdentified(Peer { sterna, features: 0 });
    let start: &[E] = if config.return_path { &[E::ChannelsReady, identified] } else { &[E::ChannelsReady] };
    for event in start.iter().chain(events) {
        machine.handle(at(0), *event).expect("not refused");
    }
    machine
}

fn with_ack(switchover_ack: SwitchoverAck) -> Config {
    Config { return_path: true, switchover_ack, ..Default::default() }
}

const TO_ACK: [E; 6] = [
    GO,
    E::GuestStopped { was_running: true },
    E::HooksReleased,
    E::FinalStateSent,
    E::PrepareAcknowledged,
    E::EofSent,
];

#[test]
fn switchover_with_legacy_ack_missing_is_refused_until_it_comes() {
    let mut machine = source(with_ack(SwitchoverAck::Legacy), true, &[]);
    let missing = Refusal::AcknowledgementsMissing { arrived: 0, due: 1 };
    assert_eq!(machine.handle(at(0), GO), Err(missing));
    assert_eq!(machine.handle(at(0), E::SwitchoverAck), Ok(vec![]));
    assert!(machine.is_acknowledged());
    assert_eq!(machine.handle(at(0), GO), Ok(vec![A::StopGuest]));
}

#[test]
fn switchover_of_paused_guest_waits_for_no_ack() {
    let mut machine = source(with_ack(SwitchoverAck::Legacy), true, &[]);
    let go = E::SwitchoverRequested { guest_running: false };
    assert_eq!(machine.handle(at(0), go), Ok(vec![A::StopGuest]));
}

#[test]
fn modern_ack_counts_what_devices_ask() {
    let mut machine = source(with_ack(SwitchoverAck::Modern), true, &[E::DeviceAsksAck, E::DeviceAsksAck]);
    machine.handle(at(0), E::SwitchoverAck).expect("due");
    let missing = Refusal::AcknowledgementsMissing { arrived: 1, due: 2 };
    assert_eq!(machine.handle(at(0), GO), Err(missing));
    machine.handle(at(0), E::SwitchoverAck).expect("due");
    assert_eq!(machine.handle(at(0), GO), Ok(vec![A::StopGuest]));
}

#[test]
fn ack_more_than_due_fails_and_source_runs_on() {
    for (mode, due) in [(SwitchoverAck::Off, 0), (SwitchoverAck::Legacy, 1), (SwitchoverAck::Modern, 0)] {
        let mut machine = source(with_ack(mode), true, &vec![E::SwitchoverAck; due]);
        machine.handle(at(0), E::SwitchoverAck).expect("an event, not a refusal");
        assert_eq!(machine.state(), S::Failing, "{mode:?}");
        assert!(machine.may_guest_run());
    }
}

#[test]
fn shut_that_never_comes_leads_to_questions_at_intervals() {
    let limits = Limits { acknowledge: at(4), ask: at(2), ask_interval: at(1), ..Limits::default() };
    let config = Config { return_path: true, limits, ..Default::default() };
    let mut machine = source(config, true, &TO_ACK);
    assert_eq!(machine.deadline(), Some(at(4)));
    assert_eq!(machine.handle(at(3), E::Tick), Ok(vec![]));
    let late = A::ReportUndecided(Cause::TimedOut(S::AwaitingAck));
    assert_eq!(machine.handle(at(4), E::Tick), Ok(vec![A::CloseChannels, late, A::AskAgain]));
    // No answer within the limit: the source asks again.
    assert_eq!(machine.deadline(), Some(at(6)));
    assert_eq!(machine.handle(at(6), E::Tick), Ok(vec![A::AskAgain]));
    // An answer that decides nothing: the source waits one interval before it asks again.
    assert_eq!(machine.handle(at(6), E::AskAnswered(Status::Pending)), Ok(vec![]));
    assert_eq!(machine.deadline(), Some(at(7)));
    assert_eq!(machine.handle(at(7), E::Tick), Ok(vec![A::AskAgain]));
    assert!(!machine.may_guest_run());
    machine.handle(at(9), E::AskAnswered(Status::Committed)).expect("an answer");
    assert_eq!(machine.state(), S::Completed);
}

#[test]
fn undecided_with_qemu_peer_asks_nobody_and_waits_for_operator() {
    let config = Config { return_path: true, ..Default::default() };
    let mut machine = source(config, false, &TO_ACK);
    let lost = machine.handle(at(1), E::ConnectionLost);
    assert_eq!(lost, Ok(vec![A::CloseChannels, A::ReportUndecided(Cause::ConnectionLost)]));
    assert_eq!(machine.deadline(), None);
    // Even an impossible report of a failed question does not make it ask.
    assert_eq!(machine.handle(at(2), E::AskFailed), Ok(vec![]));
    assert_eq!(machine.deadline(), None);
    assert_eq!(machine.handle(at(2), E::Cancel), Err(Refusal::CancelUndecided));
}

#[test]
fn hooks_that_the_destination_still_holds_are_tried_again() {
    let limits = Limits { reacquire: at(10), reacquire_interval: at(1), ..Limits::default() };
    let config = Config { return_path: true, limits, ..Default::default() };
    let mut machine = source(config, true, &TO_ACK[..4]);
    let cancelled = machine.handle(at(0), E::Cancel);
    assert_eq!(cancelled, Ok(vec![A::CloseChannels, A::ReacquireHooks]));
    assert_eq!(machine.handle(at(0), E::HooksReacquireFailed), Ok(vec![]));
    assert_eq!(machine.deadline(), Some(at(1)));
    assert_eq!(machine.handle(Duration::from_millis(999), E::Tick), Ok(vec![]));
    assert_eq!(machine.handle(at(1), E::Tick), Ok(vec![A::ReacquireHooks]));
    assert_eq!(machine.handle(at(1), E::HooksReacquired), Ok(vec![A::ResumeGuest]));
}

#[test]
fn hooks_are_not_tried_again_from_the_limit_on() {
    let limits = Limits { reacquire: at(10), reacquire_interval: at(1), ..Limits::default() };
    let config = Config { return_path: true, limits, ..Default::default() };
    for (failed_at, state) in [(9, S::Cancelling), (10, S::Held)] {
        let mut machine = source(config, true, &TO_ACK[..4]);
        machine.handle(at(0), E::Cancel).expect("not refused");
        let mut answered = machine.handle(at(failed_at), E::HooksReacquireFailed).expect("not refused");
        // The remaining effects are undone without the hooks.
        while let Some(action) = answered.pop() {
            if action == A::StopTracking {
                answered = machine.handle(at(failed_at), E::TrackingStopped).expect("not refused");
            }
        }
        assert_eq!(machine.state(), state, "failed after {failed_at} s");
    }
}

#[test]
fn limit_of_max_has_no_deadline() {
    let limits = Limits { setup: Duration::MAX, ..Limits::default() };
    let machine = Source::new(Config { limits, ..Default::default() }, Duration::ZERO);
    assert_eq!(machine.deadline(), None);
}

#[test]
fn source_knows_its_peer_and_whether_it_has_committed() {
    let mut machine = source(with_ack(SwitchoverAck::Off), true, &TO_ACK[..4]);
    assert_eq!(machine.peer(), Peer { sterna: true, features: 0 });
    assert!(!machine.state().is_committed());

    machine.handle(at(0), E::PrepareAcknowledged).expect("not refused");

    assert!(machine.state().is_committed());
}

#[test]
fn tracking_that_nobody_stopped_yet_is_stopped_at_its_turn() {
    for early in [E::TrackingStopped, E::TrackingStopFailed] {
        let mut machine = source(with_ack(SwitchoverAck::Off), true, &TO_ACK[..4]);
        machine.handle(at(0), E::Cancel).expect("not refused");

        assert_eq!(machine.handle(at(0), early), Ok(vec![]), "{early:?}");

        assert_eq!(machine.handle(at(0), E::HooksReacquired), Ok(vec![A::ResumeGuest]));
        assert_eq!(machine.handle(at(0), E::GuestResumed), Ok(vec![A::StopTracking]));
    }
}

#[test]
fn final_states_are_those_after_which_nothing_comes() {
    let over: Vec<S> = S::ALL.into_iter().filter(|state| state.is_final()).collect();
    assert_eq!(over, [S::Completed, S::Cancelled, S::Failed]);
}
