//! What a destination says of itself on its way: deadline, id, and whether its guest may run.

use std::time::Duration;

use sterna_proto::destination::{Config, Destination, Event as E, State as S};
use sterna_proto::{Limits, MigrationId};

const ID: MigrationId = MigrationId([7; 16]);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A destination that has been told these events at time 0.
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

    // Nothing could be answered, so nothing is loaded to the end for it.
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
