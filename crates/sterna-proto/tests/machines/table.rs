//! Every (state, event) pair of both machines has a defined result: the next state and actions, or
//! a refusal that changes nothing.
//!
//! The results are the files in `tests/tables`. `STERNA_BLESS=1` rewrites them; a reviewer then
//! reads the difference.

use std::fmt::{Debug, Display, Write};
use std::time::Duration;
use sterna_proto::destination::{self as dst, Destination};
use sterna_proto::source::{self as src, Decision, Source};
use sterna_proto::{Limits, MigrationId, Status};

const START: Duration = Duration::ZERO;
/// Later than every limit.
const LATE: Duration = Duration::from_secs(100_000);
const ID: MigrationId = MigrationId([7; 16]);

/// Limits that permit the replacement of a lost connection.
fn limits() -> Limits {
    Limits { reconnect: Duration::from_secs(30), ..Limits::default() }
}

fn source_events() -> Vec<src::Event> {
    use src::Event as E;
    let peer = |sterna| src::Peer { sterna, features: u16::from(sterna) };
    vec![
        E::ChannelsReady,
        E::PeerIdentified(peer(true)),
        E::PeerIdentified(peer(false)),
        E::ConfigurationWanted,
        E::ConfigurationAccepted,
        E::CompatibilityAccepted,
        E::DeviceAsksAck,
        E::SwitchoverAck,
        E::SwitchoverRequested { guest_running: true },
        E::SwitchoverRequested { guest_running: false },
        E::PostcopyRequested { guest_running: true },
        E::GuestStopped { was_running: true },
        E::GuestStopped { was_running: false },
        E::GuestStopFailed,
        E::OperatorContinue,
        E::HooksReleased,
        E::HookReleaseFailed,
        E::FinalStateSent,
        E::PrepareAcknowledged,
        E::EofSent,
        E::EofFailed,
        E::DestinationStarted,
        E::PagesSent,
        E::ChannelsClosed,
        E::ResumeRequested,
        E::PauseRequested,
        E::ResumeAcknowledged,
        E::Shut(0),
        E::Shut(1),
        E::ConnectionLost,
        E::PeerMisbehaved,
        E::LocalFailure,
        E::AskAnswered(Status::Committed),
        E::AskAnswered(Status::Incomplete),
        E::AskAnswered(Status::Never),
        E::AskAnswered(Status::Pending),
        E::AskAnswered(Status::Unknown),
        E::AskFailed,
        E::MayReconnect,
        E::Reconnected,
        E::ReconnectFailed,
        E::ReconnectRefused,
        E::Cancel,
        E::GuestWithheld { was_running: true },
        E::GuestGivenBack,
        E::ProtectionEnded { guest_is_here: true },
        E::ProtectionEnded { guest_is_here: false },
        E::OperatorDecides(Decision::SourceRuns),
        E::OperatorDecides(Decision::DestinationRuns),
        E::HooksReacquired,
        E::HooksReacquireFailed,
        E::GuestResumed,
        E::GuestResumeFailed,
        E::TrackingStopped,
        E::TrackingStopFailed,
        E::OperatorRetry,
        E::Tick,
    ]
}

/// The events that lead to a state, with a Sterna peer and every option on.
fn source_path(state: src::State) -> Vec<src::Event> {
    use src::{Event as E, State as S};
    let forward = [
        (S::Setup, E::ChannelsReady),
        (S::Identifying, E::PeerIdentified(src::Peer { sterna: true, features: 1 })),
        (S::Comparing, E::CompatibilityAccepted),
        (S::Active, E::SwitchoverRequested { guest_running: true }),
        (S::Stopping, E::GuestStopped { was_running: true }),
        (S::PreSwitchover, E::OperatorContinue),
        (S::Releasing, E::HooksReleased),
        (S::Switchover, E::FinalStateSent),
        (S::Preparing, E::PrepareAcknowledged),
        (S::Committing, E::EofSent),
        (S::AwaitingAck, E::ConnectionLost),
        (S::Undecided, E::AskAnswered(Status::Committed)),
    ];
    let until = |last: S| -> Vec<E> {
        let before = forward.iter().take_while(|(at, _)| *at != last);
        before.map(|(_, event)| *event).collect()
    };
    let then = |last: S, rest: &[E]| [&until(last)[..], rest].concat();
    let in_postcopy = |rest: &[E]| {
        let begin = until(S::Active).into_iter().chain([E::PostcopyRequested { guest_running: true }]);
        let then = forward.iter().skip_while(|(at, _)| *at != S::Stopping).map(|(_, event)| *event);
        begin.chain(then.take(6)).chain([E::DestinationStarted]).chain(rest.to_vec()).collect()
    };
    let undone = [E::HooksReacquired, E::GuestResumed, E::TrackingStopped];
    match state {
        // A seeding skips the steps of a handover.
        S::Seeding => {
            let until_stopped = until(S::PreSwitchover);
            [&until_stopped[..], &[E::FinalStateSent]].concat()
        }
        S::Protected => {
            let until_stopped = until(S::PreSwitchover);
            [&until_stopped[..], &[E::FinalStateSent, E::Shut(0)]].concat()
        }
        S::Configuring => vec![E::ChannelsReady, E::ConfigurationWanted],
        S::Suspending => then(S::Preparing, &[E::MayReconnect, E::ConnectionLost]),
        S::Reconnecting => {
            let back = [E::HooksReacquired, E::GuestResumed];
            then(S::Preparing, &[&[E::MayReconnect, E::ConnectionLost], &back[..]].concat())
        }
        S::Postcopy => in_postcopy(&[]),
        S::PostcopyPaused => in_postcopy(&[E::ConnectionLost]),
        S::PostcopyRecover => in_postcopy(&[E::ConnectionLost, E::ChannelsClosed, E::ResumeRequested]),
        S::Cancelling => then(S::Preparing, &[E::Cancel]),
        S::Failing => then(S::Preparing, &[E::ConnectionLost]),
        S::Cancelled => then(S::Preparing, &[&[E::Cancel], &undone[..]].concat()),
        S::Failed => then(S::Preparing, &[&[E::ConnectionLost], &undone[..]].concat()),
        S::Held => {
            let held = [E::Cancel, E::HooksReacquired, E::GuestResumeFailed, E::TrackingStopped];
            then(S::Preparing, &held)
        }
        other => until(other),
    }
}

fn source_in(state: src::State) -> Source {
    let config = src::Config {
        return_path: true,
        compatibility: true,
        pause_before_switchover: true,
        protects: state.is_of_protection(),
        limits: limits(),
        postcopy: matches!(
            state,
            src::State::Postcopy | src::State::PostcopyPaused | src::State::PostcopyRecover
        ),
        ..Default::default()
    };
    let mut machine = Source::new(config, START);
    for event in source_path(state) {
        machine.handle(START, event).expect("the path is not refused");
    }
    assert_eq!(machine.state(), state);
    machine
}

fn destination_events() -> Vec<dst::Event> {
    use dst::Event as E;
    vec![
        E::ChannelsReady,
        E::ReturnPathOpened,
        E::HandoverIdRead(ID),
        E::PrepareRead,
        E::PostcopyBegins,
        E::RunRead,
        E::EofRead,
        E::Superseded,
        E::PauseRequested,
        E::ChannelsClosed,
        E::RecoveryBegun,
        E::ResumeRead,
        E::PagesComplete,
        E::PagesFailed,
        E::LoadComplete { run: true },
        E::LoadComplete { run: false },
        E::HooksAcquired,
        E::HookAcquireFailed,
        E::GuestStarted,
        E::GuestStartFailed,
        E::MemoryMayChange,
        E::HooksGivenBack,
        E::HookGiveBackFailed,
        E::ConnectionLost,
        E::PeerMisbehaved,
        E::LocalFailure,
        E::StatusAsked(ID),
        E::StatusAsked(MigrationId([8; 16])),
        E::OperatorCont,
        E::MayReconnect,
        E::Resumed,
        E::SourceGaveUp,
        E::Abandon,
        E::Discard,
        E::Tick,
    ]
}

/// The events that lead to a state, from a Sterna source.
///
/// For `Held` they come from a QEMU source, because no Sterna source causes that state.
fn destination_path(state: dst::State) -> Vec<dst::Event> {
    use dst::{Event as E, State as S};
    let start = [E::ChannelsReady, E::ReturnPathOpened, E::HandoverIdRead(ID)];
    let then = |rest: &[E]| [&start[..], rest].concat();
    let run = E::LoadComplete { run: true };
    let paused = E::LoadComplete { run: false };
    match state {
        S::Setup => vec![],
        S::Active => then(&[]),
        S::Completing => then(&[E::PrepareRead]),
        S::Preparing => then(&[E::PrepareRead, run]),
        S::Prepared => then(&[E::PrepareRead, run, E::HooksAcquired]),
        S::Committed => then(&[E::PrepareRead, run, E::HooksAcquired, E::EofRead]),
        S::Postcopy => then(&[E::PrepareRead, run, E::HooksAcquired, E::RunRead, E::GuestStarted]),
        S::PostcopyPaused => {
            then(&[E::PrepareRead, run, E::HooksAcquired, E::RunRead, E::GuestStarted, E::ConnectionLost])
        }
        S::PostcopyRecover => then(&[
            E::PrepareRead,
            run,
            E::HooksAcquired,
            E::RunRead,
            E::GuestStarted,
            E::ConnectionLost,
            E::ChannelsClosed,
            E::RecoveryBegun,
        ]),
        S::Running => then(&[E::PrepareRead, run, E::HooksAcquired, E::EofRead, E::GuestStarted]),
        S::Paused => then(&[E::PrepareRead, paused, E::HooksAcquired, E::EofRead]),
        S::Held => {
            vec![E::ChannelsReady, E::ReturnPathOpened, E::EofRead, run, E::HooksAcquired]
        }
        S::Suspending => then(&[E::MayReconnect, E::PrepareRead, run, E::HooksAcquired, E::ConnectionLost]),
        S::Suspended => then(&[E::MayReconnect, E::ConnectionLost]),
        S::Failing => then(&[E::PrepareRead, run, E::HooksAcquired, E::ConnectionLost]),
        S::Failed => then(&[E::ConnectionLost]),
    }
}

fn destination_in(state: dst::State) -> Destination {
    let config = dst::Config { managed: true, limits: limits(), ..Default::default() };
    let mut machine = Destination::new(config, START);
    for event in destination_path(state) {
        machine.handle(START, event).expect("the path is not refused");
    }
    assert_eq!(machine.state(), state);
    machine
}

/// The rows of one state; events with the same result share a row.
#[derive(Default)]
struct Rows(Vec<(String, Vec<String>)>);

impl Rows {
    /// Adds an event's result. A refusal must change nothing.
    fn add<M: Debug, S: Debug, A: Debug, R: Debug + Display>(
        &mut self,
        event: &dyn Debug,
        before: &str,
        (machine, state): (&M, S),
        result: Result<A, R>,
    ) {
        let result = match result {
            Ok(actions) => format!("{state:?} {actions:?}"),
            Err(refusal) => {
                assert_eq!(before, format!("{machine:?}"), "{refusal:?} changed the machine");
                assert!(refusal.to_string().len() > 20, "{refusal:?} says too little");
                let refusal = format!("{refusal:?}");
                let name = refusal.split([' ', '{']).next().unwrap_or_default();
                format!("refused: {name}")
            }
        };
        let event = format!("{event:?}");
        match self.0.iter_mut().find(|(known, _)| *known == result) {
            Some((_, events)) => events.push(event),
            None => self.0.push((result, vec![event])),
        }
    }

    fn write(&self, table: &mut String) {
        for (result, events) in &self.0 {
            writeln!(table, "  -> {result}").expect("a string");
            for event in events {
                writeln!(table, "       {event}").expect("a string");
            }
        }
    }
}

/// Replaces the bytes of the ids with names, because the bytes are irrelevant to a reader.
fn tidy(table: String) -> String {
    table.replace(&format!("{ID:?}"), "this").replace(&format!("{:?}", MigrationId([8; 16])), "other")
}

fn compare(name: &str, table: String) {
    let path = format!("{}/tests/tables/{name}", env!("CARGO_MANIFEST_DIR"));
    let table = tidy(table);
    if std::env::var_os("STERNA_BLESS").is_some() {
        std::fs::write(&path, &table).expect("the table can be written");
    }
    let known = std::fs::read_to_string(&path).expect("the table can be read");
    for (line, (now, known)) in table.lines().zip(known.lines()).enumerate() {
        assert_eq!(now, known, "{name}:{}", line + 1);
    }
    assert_eq!(table.len(), known.len(), "{name} has other rows");
}

#[test]
fn source_every_state_and_event_has_defined_result() {
    let mut table = String::new();
    for state in src::State::ALL {
        writeln!(table, "{state:?} ({})", state.qemu_status()).expect("a string");
        let mut rows = Rows::default();
        for event in source_events() {
            let mut machine = source_in(state);
            let before = format!("{machine:?}");
            let result = machine.handle(LATE, event);
            rows.add(&event, &before, (&machine, machine.state()), result);
        }
        rows.write(&mut table);
    }
    compare("source.txt", table);
}

#[test]
fn destination_every_state_and_event_has_defined_result() {
    let mut table = String::new();
    for state in dst::State::ALL {
        writeln!(table, "{state:?} ({})", state.qemu_status()).expect("a string");
        let mut rows = Rows::default();
        for event in destination_events() {
            let mut machine = destination_in(state);
            let before = format!("{machine:?}");
            let result = machine.handle(LATE, event);
            rows.add(&event, &before, (&machine, machine.state()), result);
        }
        rows.write(&mut table);
    }
    compare("destination.txt", table);
}

#[test]
fn source_every_pair_of_events_never_panics() {
    for state in src::State::ALL {
        for first in source_events() {
            for second in source_events() {
                let mut machine = source_in(state);
                let _ = machine.handle(START, first);
                let _ = machine.handle(LATE, second);
                assert!(!(machine.state().is_final() && machine.deadline().is_some()));
            }
        }
    }
}

#[test]
fn destination_every_pair_of_events_never_panics() {
    for state in dst::State::ALL {
        for first in destination_events() {
            for second in destination_events() {
                let mut machine = destination_in(state);
                let _ = machine.handle(START, first);
                let _ = machine.handle(LATE, second);
                assert!(!(machine.state().is_final() && machine.deadline().is_some()));
            }
        }
    }
}

#[test]
fn source_before_its_deadline_tick_does_nothing() {
    for state in src::State::ALL {
        let mut machine = source_in(state);
        let before = format!("{machine:?}");
        assert_eq!(machine.handle(START, src::Event::Tick), Ok(vec![]));
        assert_eq!(before, format!("{machine:?}"));
    }
}
