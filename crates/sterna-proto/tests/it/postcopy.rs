//! Both machines where the guest goes on at the destination before its pages are there.

use std::time::Duration;

use sterna_proto::destination::{self as dst, Destination};
use sterna_proto::source::{self as src, Decision, Refusal, Source};
use sterna_proto::{MigrationId, Status};

const NOW: Duration = Duration::ZERO;
const ID: MigrationId = MigrationId([7; 16]);
const GO: src::Event = src::Event::PostcopyRequested { guest_running: true };

fn active(sterna: bool) -> Source {
    use src::Event as E;
    let config = src::Config { return_path: true, postcopy: true, ..Default::default() };
    let mut machine = Source::new(config, NOW);
    for event in [E::ChannelsReady, E::PeerIdentified(src::Peer { sterna, features: 0 })] {
        machine.handle(NOW, event).expect("not refused");
    }
    machine
}

/// A source that is told these events after its guest was asked to stop.
fn switching(sterna: bool, events: &[src::Event]) -> Source {
    use src::Event as E;
    let mut machine = active(sterna);
    let first = [GO, E::GuestStopped { was_running: true }, E::HooksReleased, E::FinalStateSent];
    for event in first.iter().chain(events) {
        machine.handle(NOW, *event).expect("not refused");
    }
    machine
}

#[test]
fn source_prepares_a_sterna_and_commits_with_run() {
    use src::{Action as A, Event as E};
    let mut machine = active(true);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    assert_eq!(tell(GO), [A::StopGuest]);
    assert_eq!(tell(E::GuestStopped { was_running: true }), [A::ReleaseHooks]);
    assert_eq!(tell(E::HooksReleased), [A::SendFinalState]);
    assert_eq!(tell(E::FinalStateSent), [A::SendPrepare]);
    assert_eq!(tell(E::PrepareAcknowledged), [A::SendRun]);
    assert_eq!(tell(E::EofSent), []);
    assert_eq!(tell(E::DestinationStarted), [A::SendPages]);
    assert_eq!(tell(E::PagesSent), []);
    assert!(matches!(tell(E::Shut(0))[..], [A::CloseChannels, A::StopTracking, A::Finish(_)]));
}

#[test]
fn a_loss_in_the_switch_is_not_waited_for_and_one_before_it_is() {
    use src::{Event as E, State as S};
    let limits = sterna_proto::Limits { reconnect: Duration::from_secs(30), ..Default::default() };
    let config = src::Config { return_path: true, postcopy: true, limits, ..Default::default() };
    let mut machine = Source::new(config, NOW);
    let sterna = src::Peer { sterna: true, features: 0 };
    for event in [E::ChannelsReady, E::PeerIdentified(sterna), E::MayReconnect] {
        machine.handle(NOW, event).expect("not refused");
    }
    let mut lost = machine.clone();
    lost.handle(NOW, E::ConnectionLost).expect("not refused");
    assert_eq!(lost.state(), S::Reconnecting);
    // Over the new connection it may switch, too.
    for event in [E::Reconnected, GO, E::GuestStopped { was_running: true }, E::HooksReleased] {
        lost.handle(NOW, event).expect("not refused");
    }
    assert!(lost.is_postcopy() && !lost.would_reconnect());
    for after in
        [&[GO][..], &[GO, E::GuestStopped { was_running: true }, E::HooksReleased, E::FinalStateSent]]
    {
        let mut machine = machine.clone();
        for event in after.iter().chain(&[E::ConnectionLost]) {
            machine.handle(NOW, *event).expect("not refused");
        }
        assert_eq!(machine.state(), S::Failing);
    }
    let config = dst::Config { limits, ..Default::default() };
    let mut machine = Destination::new(config, NOW);
    use dst::Event as D;
    for event in [D::ChannelsReady, D::ReturnPathOpened, D::HandoverIdRead(ID), D::MayReconnect] {
        machine.handle(NOW, event).expect("not refused");
    }
    assert!(machine.would_suspend());
    machine.handle(NOW, D::PostcopyBegins).expect("not refused");
    machine.handle(NOW, D::ConnectionLost).expect("not refused");
    assert_eq!(machine.state(), dst::State::Failed);
}

#[test]
fn source_commits_to_a_qemu_with_the_package() {
    let mut machine = active(false);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    tell(GO);
    tell(src::Event::GuestStopped { was_running: true });
    tell(src::Event::HooksReleased);
    assert_eq!(tell(src::Event::FinalStateSent), [src::Action::SendRun]);
}

#[test]
fn source_takes_its_guest_back_until_run_and_never_once_it_was_started() {
    use src::{Event as E, State as S};
    let mut before = switching(true, &[]);
    before.handle(NOW, E::ConnectionLost).expect("not refused");
    assert_eq!(before.state(), S::Failing);

    let mut after = switching(true, &[E::PrepareAcknowledged]);
    after.handle(NOW, E::ConnectionLost).expect("not refused");
    assert_eq!(after.state(), S::Undecided);
    after.handle(NOW, E::AskAnswered(Status::Incomplete)).expect("not refused");
    assert_eq!(after.state(), S::PostcopyPaused);

    let started = [E::PrepareAcknowledged, E::EofSent, E::DestinationStarted, E::ConnectionLost];
    for word in [E::Shut(1), E::AskAnswered(Status::Never), E::ConnectionLost, E::LocalFailure, E::Tick] {
        let mut machine = switching(true, &started);
        machine.handle(Duration::from_secs(100_000), word).expect("not refused");
        assert_eq!(machine.state(), S::PostcopyPaused, "{word:?}");
    }
    let mut machine = switching(true, &started);
    let own = E::OperatorDecides(Decision::SourceRuns);
    assert_eq!(machine.handle(NOW, own), Err(Refusal::RanElsewhere));
    assert!(machine.handle(NOW, E::Cancel).is_err());
    machine.handle(NOW, E::AskAnswered(Status::Committed)).expect("not refused");
    assert_eq!(machine.state(), S::Completed);
}

#[test]
fn shut_before_all_pages_were_sent_is_a_lie() {
    use src::{Event as E, State as S};
    let mut machine = switching(true, &[E::PrepareAcknowledged, E::EofSent]);
    machine.handle(NOW, E::Shut(0)).expect("not refused");
    assert_eq!(machine.state(), S::Undecided);
    let mut machine = switching(true, &[E::PrepareAcknowledged, E::EofSent, E::DestinationStarted]);
    machine.handle(NOW, E::Shut(0)).expect("not refused");
    assert_eq!(machine.state(), S::PostcopyPaused);
}

#[test]
fn failure_of_a_qemu_behind_run_does_not_bring_the_guest_back() {
    use src::{Event as E, State as S};
    for (sterna, state) in [(true, S::Failing), (false, S::Undecided)] {
        let committed: &[E] = if sterna { &[E::PrepareAcknowledged] } else { &[] };
        let mut machine = switching(sterna, committed);
        machine.handle(NOW, E::Shut(1)).expect("not refused");
        assert_eq!(machine.state(), state);
    }
}

#[test]
fn postcopy_is_refused_without_the_capability_and_at_a_wrong_time() {
    let mut plain = Source::new(src::Config { return_path: true, ..Default::default() }, NOW);
    assert!(matches!(plain.handle(NOW, GO), Err(Refusal::NotActive { .. })));
    plain.handle(NOW, src::Event::ChannelsReady).expect("not refused");
    plain.handle(NOW, src::Event::PeerIdentified(src::Peer::default())).expect("not refused");
    assert_eq!(plain.handle(NOW, GO), Err(Refusal::NoPostcopy));
    let mut switched = switching(true, &[]);
    assert!(matches!(switched.handle(NOW, GO), Err(Refusal::NotActive { .. })));
}

fn destination(events: &[dst::Event]) -> Destination {
    use dst::Event as E;
    let mut machine = Destination::new(dst::Config::default(), NOW);
    let loaded = [
        E::ChannelsReady,
        E::ReturnPathOpened,
        E::HandoverIdRead(ID),
        E::PrepareRead,
        E::LoadComplete { run: true },
        E::HooksAcquired,
    ];
    for event in loaded.iter().chain(events) {
        machine.handle(NOW, *event).expect("not refused");
    }
    machine
}

#[test]
fn destination_runs_at_run_and_says_shut_when_all_pages_are_there() {
    use dst::{Action as A, Event as E};
    let mut machine = destination(&[]);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    assert_eq!(tell(E::RunRead), [A::StartGuest]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Pending)]);
    assert_eq!(tell(E::GuestStarted), [A::SayStarted, A::AnnounceNetwork]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Incomplete)]);
    assert_eq!(tell(E::EofRead), [A::FinishPages]);
    assert_eq!(tell(E::ConnectionLost), [], "what is missing is known when all that came is in place");
    let finish = A::Finish(dst::Outcome::Running);
    assert_eq!(tell(E::PagesComplete), [A::SendShut(0), A::CloseChannels, finish]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Committed)]);
}

#[test]
fn destination_that_loses_its_source_keeps_the_guest_waiting() {
    use dst::{Action as A, Event as E};
    let wait = [A::KeepWaiting, A::ReportHeld(dst::Held::Pages)];
    let mut machine = destination(&[E::RunRead, E::GuestStarted]);
    assert_eq!(machine.handle(NOW, E::ConnectionLost).expect("not refused"), wait);
    assert!(machine.may_guest_run());
    assert!(machine.handle(NOW, E::Abandon).is_err() && machine.handle(NOW, E::Discard).is_err());

    let mut machine = destination(&[E::RunRead, E::ConnectionLost]);
    let started = machine.handle(NOW, E::GuestStarted).expect("not refused");
    assert_eq!(started[2..], wait, "lost while the guest was being started");

    let mut machine = destination(&[E::RunRead, E::ConnectionLost]);
    machine.handle(NOW, E::GuestStartFailed).expect("not refused");
    machine.handle(NOW, E::HooksGivenBack).expect("not refused");
    assert_eq!(machine.status(ID), Status::Never, "it never ran");
}

#[test]
fn guest_that_is_taken_over_paused_gets_its_pages_too() {
    use dst::{Action as A, Event as E};
    let mut machine = Destination::new(dst::Config { autostart: false, ..Default::default() }, NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    for event in [E::ChannelsReady, E::ReturnPathOpened, E::HandoverIdRead(ID), E::PrepareRead] {
        tell(event);
    }
    tell(E::LoadComplete { run: true });
    tell(E::HooksAcquired);
    assert_eq!(tell(E::RunRead), [A::SayStarted, A::AnnounceNetwork]);
    tell(E::EofRead);
    tell(E::PagesComplete);
    assert!(machine.is_taken_over_paused());
    assert_eq!(machine.state(), dst::State::Paused);
}

#[test]
fn destination_of_a_qemu_loads_and_runs_at_run() {
    use dst::{Action as A, Event as E};
    let mut machine = Destination::new(dst::Config { managed: true, ..Default::default() }, NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    tell(E::ChannelsReady);
    tell(E::ReturnPathOpened);
    assert_eq!(tell(E::RunRead), [A::FinishLoading]);
    assert_eq!(tell(E::LoadComplete { run: true }), [A::AcquireHooks]);
    assert_eq!(
        tell(E::HooksAcquired),
        [A::StartGuest],
        "its source never runs it again: nothing to wait for"
    );
    assert_eq!(tell(E::GuestStarted), [A::SayStarted, A::AnnounceNetwork]);
}
