//! The destination's queries along a migration: deadline, id, and whether its guest may run.

use std::time::Duration;

use sterna_proto::destination::{Action as A, Config, Destination, Event as E, Held, State as S};
use sterna_proto::{Limits, MigrationId, Status};

const ID: MigrationId = MigrationId([7; 16]);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A destination that handled these events at time 0.
fn told(config: Config, events: &[E]) -> Destination {
    let mut machine = Destination::new(config, at(0));
    for event in events {
        machine.handle(at(0), *event).expect("not refused");
    }
    machine
}

#[test]
fn setup_ends_at_its_limit() {
    let limits = Limits { setup: at(5), ..Limits::default() };
    let mut machine = told(Config { limits, ..Config::default() }, &[]);

    assert_eq!(machine.deadline(), Some(at(5)));
    machine.handle(at(4), E::Tick).expect("early");
    assert_eq!(machine.state(), S::Setup);
    machine.handle(at(5), E::Tick).expect("due");
    assert!(matches!(machine.state(), S::Failing | S::Failed));
}

#[test]
fn id_is_known_once_the_source_has_said_it() {
    let mut machine = told(Config::default(), &[E::ChannelsReady, E::ReturnPathOpened]);
    assert_eq!(machine.id(), None);

    machine.handle(at(0), E::HandoverIdRead(ID)).expect("not refused");

    assert_eq!(machine.id(), Some(ID));
}

#[test]
fn guest_may_run_only_when_it_has_been_taken_over() {
    let with_prepare = [E::ChannelsReady, E::ReturnPathOpened, E::HandoverIdRead(ID), E::PrepareRead];
    let rest = [E::LoadComplete { run: true }, E::HooksAcquired, E::EofRead, E::GuestStarted];
    let all = [&with_prepare[..], &rest].concat();

    for count in 0..all.len() {
        assert!(!told(Config::default(), &all[..count]).may_guest_run(), "after {count} events");
    }
    assert!(told(Config::default(), &all).may_guest_run());
}

#[test]
fn only_a_source_without_return_path_may_close_behind_its_end() {
    let without = told(Config::default(), &[E::ChannelsReady, E::EofRead, E::ConnectionLost]);
    assert_eq!(without.state(), S::Completing);

    let with = [E::ChannelsReady, E::ReturnPathOpened, E::EofRead, E::ConnectionLost];
    assert!(matches!(told(Config::default(), &with).state(), S::Failing | S::Failed));
}

#[test]
fn hooks_that_are_still_being_acquired_have_not_been_given_back() {
    let to_preparing = [
        E::ChannelsReady,
        E::ReturnPathOpened,
        E::HandoverIdRead(ID),
        E::PrepareRead,
        E::LoadComplete { run: true },
        E::ConnectionLost,
    ];
    for early in [E::HooksGivenBack, E::HookGiveBackFailed] {
        let mut machine = told(Config::default(), &to_preparing);

        assert_eq!(machine.handle(at(0), early), Ok(vec![]), "{early:?}");

        assert_eq!(machine.state(), S::Failing);
    }
}

#[test]
fn guest_whose_source_cannot_be_told_is_held_where_hooks_are_missing() {
    let events = [E::ChannelsReady, E::EofRead, E::LoadComplete { run: true }, E::HookAcquireFailed];

    assert_eq!(told(Config::default(), &events).state(), S::Held);
}

#[test]
fn prepare_without_a_return_path_is_the_sources_fault() {
    let machine = told(Config::default(), &[E::ChannelsReady, E::PrepareRead]);

    // The status question could not be answered, so the destination does not finish the load.
    assert_eq!(machine.state(), S::Failed);
}

#[test]
fn final_states_are_those_after_which_nothing_comes() {
    let over: Vec<S> = S::ALL.into_iter().filter(|state| state.is_final()).collect();
    assert_eq!(over, [S::Running, S::Paused, S::Failed]);
}

#[test]
fn guest_of_a_qemu_is_held_only_where_it_is_managed_and_ran() {
    let all = [
        (false, false, S::Paused),
        (false, true, S::Committed),
        (true, false, S::Paused),
        (true, true, S::Held),
    ];
    for (managed, run, expected) in all {
        let config = Config { managed, ..Config::default() };
        let events =
            [E::ChannelsReady, E::ReturnPathOpened, E::EofRead, E::LoadComplete { run }, E::HooksAcquired];
        assert_eq!(told(config, &events).state(), expected, "managed {managed}, ran {run}");
    }
}

/// A destination after the commit, between two processes of one host.
fn committed() -> Destination {
    let events = [
        E::ChannelsReady,
        E::ReturnPathOpened,
        E::HandoverIdRead(ID),
        E::PrepareRead,
        E::LoadComplete { run: true },
        E::HooksAcquired,
        E::EofRead,
    ];
    told(Config::default(), &events)
}

#[test]
fn start_that_fails_after_memory_may_have_been_written_is_final_and_may_be_tried_again() {
    let mut machine = committed();
    let mut tell = |event| machine.handle(at(0), event).expect("not refused");
    assert_eq!(tell(E::MemoryMayChange), []);
    let held = [A::SendShut(0), A::CloseChannels, A::ReportHeld(Held::Start)];
    assert_eq!(tell(E::GuestStartFailed), held, "the source lets go of the memory");
    assert_eq!((machine.state(), machine.status(ID)), (S::Held, Status::Committed));
    assert!(machine.handle(at(0), E::Abandon).is_err(), "it is the only copy");

    let mut tell = |event| machine.handle(at(0), event).expect("not refused");
    assert_eq!(tell(E::OperatorCont), [A::AcquireHooks]);
    assert_eq!(tell(E::HooksAcquired), [A::StartGuest], "nobody waits for a PONG");
    assert_eq!(tell(E::GuestStartFailed), held[1..], "once");
    tell(E::OperatorCont);
    tell(E::HooksAcquired);
    tell(E::GuestStarted);
    assert_eq!(machine.state(), S::Running);
}

#[test]
fn guest_that_is_held_after_its_memory_was_written_is_never_given_back() {
    let mut machine = committed();
    for event in [E::MemoryMayChange, E::GuestStartFailed, E::Discard, E::HooksGivenBack] {
        machine.handle(at(0), event).expect("not refused");
    }
    assert_eq!((machine.state(), machine.status(ID)), (S::Failed, Status::Committed));

    let mut machine = committed();
    for event in [E::GuestStartFailed, E::HooksGivenBack] {
        machine.handle(at(0), event).expect("not refused");
    }
    assert_eq!(machine.status(ID), Status::Never, "nothing was written");
}
