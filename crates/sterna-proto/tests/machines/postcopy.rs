//! Both machines in postcopy: the guest runs at the destination before it has every page.

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

/// A source that handles these events after it was asked to stop its guest.
pub(super) fn switching(sterna: bool, events: &[src::Event]) -> Source {
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
    // Postcopy is permitted over the new connection too.
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
fn last_word_of_a_destination_that_runs_the_guest_does_not_bring_it_back() {
    use src::{Action as A, Cause, Event as E, State as S};
    // The destination has started the guest, but its report of the start was not read. The final
    // SHUT arrives alone.
    for before in [&[E::PrepareAcknowledged][..], &[E::PrepareAcknowledged, E::EofSent]] {
        for code in [2, 3] {
            let mut machine = switching(true, before);
            let actions = machine.handle(NOW, E::Shut(code)).expect("not refused");
            let cause = Cause::DestinationFailed(code);
            assert_eq!(actions, [A::CloseChannels, A::ReportPaused(cause), A::AskAgain]);
            assert_eq!(machine.state(), S::PostcopyPaused);
        }
    }
    let mut machine = switching(true, &[E::PrepareAcknowledged, E::EofSent, E::ConnectionLost]);
    machine.handle(NOW, E::Shut(2)).expect("not refused");
    assert_eq!(machine.state(), S::PostcopyPaused);
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
    let wait = [A::KeepWaiting];
    let mut machine = destination(&[E::RunRead, E::GuestStarted]);
    assert_eq!(machine.handle(NOW, E::ConnectionLost).expect("not refused"), wait);
    let report = [A::ReportHeld(dst::Held::Pages)];
    let closed = machine.handle(NOW, E::ChannelsClosed).expect("not refused");
    assert_eq!(closed, report, "now it is known what is missing");
    assert!(machine.may_guest_run());
    assert!(machine.handle(NOW, E::Abandon).is_err() && machine.handle(NOW, E::Discard).is_err());

    let mut machine = destination(&[E::RunRead, E::ConnectionLost]);
    machine.handle(NOW, E::GuestStartFailed).expect("not refused");
    machine.handle(NOW, E::HooksGivenBack).expect("not refused");
    assert_eq!(machine.status(ID), Status::Never, "it never ran");
}

#[test]
fn destination_that_has_all_pages_completes_without_the_end_of_the_stream() {
    use dst::{Action as A, Event as E, Outcome, State as S};
    let started = [E::RunRead, E::GuestStarted];
    let lost = |events: &[E]| destination(&[&started[..], events].concat());
    // The reason for the end of the connection does not matter, because no peer can receive SHUT
    // any more.
    for end in [E::ConnectionLost, E::PeerMisbehaved, E::LocalFailure, E::PauseRequested, E::Superseded] {
        let mut machine = lost(&[end]);
        let mut tell = |event| machine.handle(NOW, event).expect("not refused");
        assert_eq!(tell(E::PagesComplete), [A::CloseChannels, A::Finish(Outcome::Running)], "{end:?}");
        assert_eq!(tell(E::ChannelsClosed), [], "{end:?}: nothing is held");
        assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Committed)]);
        assert_eq!(tell(E::PagesComplete), [], "once");
        assert!(!machine.lacks_pages() && machine.state() == S::Running);
        assert!(machine.handle(NOW, E::RecoveryBegun).is_err(), "nothing is left to recover");
    }
    // The connection was lost while the guest was being started.
    let mut machine = destination(&[E::RunRead, E::ConnectionLost, E::GuestStarted]);
    machine.handle(NOW, E::PagesComplete).expect("not refused");
    assert_eq!(machine.state(), S::Running);
    let mut machine = destination(&[E::RunRead, E::ConnectionLost, E::PagesComplete]);
    assert_eq!(machine.handle(NOW, E::ChannelsClosed).expect("not refused"), [], "nothing is missing");
    assert_eq!((machine.state(), machine.status(ID)), (S::PostcopyPaused, Status::Incomplete));
    let started = machine.handle(NOW, E::GuestStarted).expect("not refused");
    assert_eq!(started[2..], [A::CloseChannels, A::Finish(Outcome::Running)]);
    // That every page is in place stays true, whatever other connection is made in the meantime.
    let mut machine = lost(&[E::EofRead, E::Superseded, E::ChannelsClosed, E::RecoveryBegun]);
    let late = machine.handle(NOW, E::PagesComplete).expect("not refused");
    assert_eq!(late, [A::CloseChannels, A::Finish(Outcome::Running)]);
}

#[test]
fn guest_that_was_taken_over_paused_and_lost_its_source_is_paused_when_it_is_whole() {
    use dst::{Action as A, Event as E};
    let mut machine = Destination::new(dst::Config { autostart: false, ..Default::default() }, NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    for event in [
        E::ChannelsReady,
        E::ReturnPathOpened,
        E::HandoverIdRead(ID),
        E::PrepareRead,
        E::LoadComplete { run: true },
        E::HooksAcquired,
        E::RunRead,
        E::ConnectionLost,
        E::GuestStarted,
    ] {
        tell(event);
    }
    assert_eq!(tell(E::PagesComplete), [A::CloseChannels, A::Finish(dst::Outcome::Paused)]);
    assert!(machine.is_taken_over_paused());
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
    assert_eq!(tell(E::RunRead), [A::TakeOverPaused]);
    assert_eq!(tell(E::GuestStarted), [A::SayStarted, A::AnnounceNetwork]);
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

/// A source in PostcopyPaused with these limits.
fn paused_source(limits: sterna_proto::Limits) -> Source {
    let mut machine = source_in_postcopy(limits);
    machine.handle(NOW, src::Event::ConnectionLost).expect("not refused");
    machine
}

fn source_in_postcopy(config: sterna_proto::Limits) -> Source {
    use src::Event as E;
    let config = src::Config { return_path: true, postcopy: true, limits: config, ..Default::default() };
    let mut machine = Source::new(config, NOW);
    for event in [
        E::ChannelsReady,
        E::PeerIdentified(src::Peer { sterna: true, features: 0 }),
        GO,
        E::GuestStopped { was_running: true },
        E::HooksReleased,
        E::FinalStateSent,
        E::PrepareAcknowledged,
        E::EofSent,
        E::DestinationStarted,
        E::PagesSent,
    ] {
        machine.handle(NOW, event).expect("not refused");
    }
    machine
}

#[test]
fn source_goes_on_when_nothing_of_the_lost_channels_is_left_and_never_runs_the_guest() {
    use src::{Action as A, Event as E, State as S};
    let mut machine = paused_source(Default::default());
    let mut tell = |event| machine.handle(NOW, event);
    // Late events of the old threads precede the end of the channels.
    assert_eq!(tell(E::ResumeRequested), Ok(vec![]));
    assert_eq!(tell(E::ConnectionLost), Ok(vec![]));
    assert_eq!(tell(E::ChannelsClosed), Ok(vec![A::Recover]));
    assert_eq!(tell(E::ResumeRequested), Err(Refusal::NotPostcopyPaused { state: S::PostcopyRecover }));
    assert_eq!(tell(E::OperatorDecides(Decision::SourceRuns)), Err(Refusal::RanElsewhere));
    assert!(tell(E::Cancel).is_err());
    assert_eq!(tell(E::ResumeAcknowledged), Ok(vec![A::SendPages]));
    let lie = tell(E::Shut(0)).expect("not refused");
    assert_eq!(lie[0], A::CloseChannels, "its pages were not sent again");
    assert!(!machine.may_guest_run());
}

#[test]
fn source_whose_attempt_fails_is_paused_as_before_and_may_try_again() {
    use src::{Action as A, Cause, Event as E, State as S};
    for (event, cause) in [
        (E::ConnectionLost, Cause::ConnectionLost),
        (E::PeerMisbehaved, Cause::PeerMisbehaved),
        (E::LocalFailure, Cause::LocalFailure),
        (E::Shut(1), Cause::DestinationFailed(1)),
        (E::Tick, Cause::TimedOut(S::PostcopyRecover)),
    ] {
        let mut machine = paused_source(Default::default());
        for event in [E::ChannelsClosed, E::ResumeRequested] {
            machine.handle(NOW, event).expect("not refused");
        }
        let late = Duration::from_secs(100_000);
        let actions = machine.handle(late, event).expect("not refused");
        assert_eq!(actions, [A::CloseChannels, A::ReportPaused(cause), A::AskAgain]);
        machine.handle(late, E::ChannelsClosed).expect("not refused");
        assert_eq!(machine.handle(late, E::ResumeRequested), Ok(vec![A::Recover]));
    }
}

#[test]
fn source_connects_again_by_itself_within_its_window_and_then_waits_for_an_operator() {
    use src::{Action as A, Cause, Event as E, State as S};
    let second = Duration::from_secs(1);
    let limits =
        sterna_proto::Limits { reconnect: 3 * second, reconnect_interval: second, ..Default::default() };
    let mut machine = paused_source(limits);
    let mut tell = |at: u32, event| machine.handle(second * at, event).expect("not refused");
    tell(0, E::ChannelsClosed);
    tell(0, E::AskAnswered(Status::Incomplete));
    assert_eq!(tell(1, E::Tick), [A::Recover]);
    assert_eq!(tell(1, E::ConnectionLost), [A::CloseChannels, A::AskAgain], "no news");
    tell(1, E::ChannelsClosed);
    tell(1, E::AskFailed);
    assert_eq!(tell(2, E::Tick), [A::Recover]);
    tell(2, E::ConnectionLost);
    tell(2, E::ChannelsClosed);
    tell(2, E::AskFailed);
    let given_up = [A::ReportPaused(Cause::TimedOut(S::PostcopyPaused)), A::AskAgain];
    assert_eq!(tell(3, E::Tick), given_up);
    assert_eq!(tell(3, E::ResumeRequested), [A::Recover], "by hand");
    tell(3, E::ResumeAcknowledged);
    tell(9, E::ConnectionLost);
    tell(9, E::ChannelsClosed);
    tell(9, E::AskFailed);
    assert_eq!(tell(10, E::Tick), [A::Recover], "another loss has a window of its own");
    // An attempt that would fail for the same reason is not repeated.
    assert_eq!(tell(10, E::PeerMisbehaved)[1], A::ReportPaused(Cause::PeerMisbehaved));
    tell(10, E::ChannelsClosed);
    tell(10, E::AskFailed);
    assert_eq!(tell(12, E::Tick), [A::AskAgain]);
}

#[test]
fn source_that_was_paused_on_purpose_connects_again_only_when_it_is_told_to() {
    use src::{Action as A, Cause, Event as E, State as S};
    let by_operator = A::ReportPaused(Cause::OperatorPaused);
    let by_destination = A::ReportPaused(Cause::DestinationFailed(2));
    // The operator's pause: in postcopy, in an attempt, and between two attempts. Then the
    // destination's SHUT, before and after the loss is noticed.
    let lost = [E::ConnectionLost];
    let in_attempt = [E::ConnectionLost, E::ChannelsClosed, E::ResumeRequested];
    for (before, word, said) in [
        (&[][..], E::PauseRequested, by_operator),
        (&in_attempt[..], E::PauseRequested, by_operator),
        (&lost[..], E::PauseRequested, by_operator),
        (&[][..], E::Shut(2), by_destination),
        (&in_attempt[..], E::Shut(2), by_destination),
        (&lost[..], E::Shut(2), by_destination),
    ] {
        let limits = sterna_proto::Limits { reconnect: Duration::from_secs(1_000), ..Default::default() };
        let mut machine = source_in_postcopy(limits);
        for event in before {
            machine.handle(NOW, *event).expect("not refused");
        }
        let actions = machine.handle(NOW, word).expect("not refused");
        assert!(actions.contains(&said), "{before:?}, {word:?}: {actions:?}");
        for event in [E::ChannelsClosed, E::AskFailed] {
            machine.handle(NOW, event).expect("not refused");
        }
        assert_eq!(machine.state(), S::PostcopyPaused);
        let later = machine.handle(Duration::from_secs(100), E::Tick).expect("not refused");
        assert_eq!(later, [A::AskAgain], "{before:?}, {word:?}");
        assert_eq!(machine.handle(NOW, E::ResumeRequested), Ok(vec![A::Recover]));
    }
}

#[test]
fn pause_is_refused_where_no_pages_follow() {
    use src::{Event as E, State as S};
    let mut machine = active(true);
    let refused = Refusal::NotPostcopyActive { state: S::Active };
    assert_eq!(machine.handle(NOW, E::PauseRequested), Err(refused));
    // Without attempts of its own the source has nothing more to pause.
    let mut machine = switching(true, &[E::PrepareAcknowledged, E::DestinationStarted, E::ConnectionLost]);
    let refused = Refusal::NotPostcopyActive { state: S::PostcopyPaused };
    assert_eq!(machine.handle(NOW, E::PauseRequested), Err(refused));
    let mut machine = destination(&[]);
    assert!(machine.handle(NOW, dst::Event::PauseRequested).is_err());
    for event in [dst::Event::RunRead, dst::Event::GuestStarted] {
        machine.handle(NOW, event).expect("not refused");
    }
    let wait = [dst::Action::KeepWaiting];
    assert_eq!(machine.handle(NOW, dst::Event::PauseRequested).expect("not refused"), wait);
    assert!(machine.handle(NOW, dst::Event::PauseRequested).is_err());
}

#[test]
fn resume_is_refused_when_nothing_is_paused() {
    let mut running = active(true);
    let refused = running.handle(NOW, src::Event::ResumeRequested);
    assert!(matches!(refused, Err(Refusal::NotPostcopyPaused { .. })));
    let answered = active(true).handle(NOW, src::Event::ResumeAcknowledged).expect("not refused");
    assert!(answered.contains(&src::Action::CloseChannels), "an answer without a question");
}

#[test]
fn destination_lets_a_source_in_when_nothing_of_the_lost_channels_is_left() {
    use dst::{Action as A, Event as E, Refusal, State as S};
    let mut machine = destination(&[E::RunRead, E::GuestStarted]);
    let early = machine.handle(NOW, E::RecoveryBegun);
    assert_eq!(early, Err(Refusal::NotPostcopyPaused { state: S::Postcopy }));
    let wait = [A::KeepWaiting];
    // EOF was read, but the source knows that the connection is lost.
    machine.handle(NOW, E::EofRead).expect("not refused");
    assert_eq!(machine.handle(NOW, E::Superseded).expect("not refused"), wait);
    assert!(machine.handle(NOW, E::RecoveryBegun).is_err() && !machine.may_recover());
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    tell(E::ChannelsClosed);
    assert_eq!(tell(E::RecoveryBegun), [A::Recover]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Incomplete)]);
    assert_eq!(tell(E::ConnectionLost), wait, "twice in a row");
    tell(E::ChannelsClosed);
    tell(E::RecoveryBegun);
    assert_eq!(tell(E::ResumeRead), [A::SayResumed]);
    assert_eq!(tell(E::EofRead), [A::FinishPages]);
    assert_eq!(tell(E::PagesComplete)[0], A::SendShut(0));
}

/// A destination whose guest is being started, and whose start blocks on a page.
fn starting(events: &[dst::Event]) -> Destination {
    destination(&[&[dst::Event::RunRead], events].concat())
}

#[test]
fn start_that_waits_for_a_page_is_no_reason_to_wait_with_a_lost_connection() {
    use dst::{Action as A, Event as E, State as S};
    for lost in [
        E::ConnectionLost,
        E::PeerMisbehaved,
        E::LocalFailure,
        E::PauseRequested,
        E::Superseded,
        E::PagesFailed,
    ] {
        let mut machine = starting(&[]);
        let mut tell = |event| machine.handle(NOW, event).expect("not refused");
        assert_eq!(tell(lost), [A::KeepWaiting], "{lost:?}");
        assert_eq!(tell(E::ChannelsClosed), [A::ReportHeld(dst::Held::Pages)], "{lost:?}");
        assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Incomplete)], "{lost:?}");
        assert!(!machine.may_guest_run(), "{lost:?}: an operator waits until it is started");
        assert!(machine.lacks_pages() && machine.may_recover(), "{lost:?}");
        assert!(machine.handle(NOW, E::Abandon).is_err() && machine.handle(NOW, E::Discard).is_err());

        let mut tell = |event| machine.handle(NOW, event).expect("not refused");
        assert_eq!(tell(E::RecoveryBegun), [A::Recover]);
        assert_eq!(tell(E::ResumeRead), [A::SayResumed]);
        assert_eq!(tell(E::EofRead), [A::FinishPages], "{lost:?}");
        assert_eq!(tell(E::PagesComplete), [], "{lost:?}: the start ends now");
        assert_eq!(
            tell(E::GuestStarted)[2..],
            [A::SendShut(0), A::CloseChannels, A::Finish(dst::Outcome::Running)]
        );
        assert_eq!(machine.state(), S::Running);
    }
}

#[test]
fn question_of_the_source_says_that_the_connection_is_lost_while_the_guest_is_being_started() {
    use dst::{Action as A, Event as E, State as S};
    let mut machine = starting(&[]);

    let asked = machine.handle(NOW, E::StatusAsked(ID)).expect("not refused");

    assert_eq!(asked, [A::KeepWaiting, A::Answer(Status::Incomplete)], "only a source without channels asks");
    assert_eq!(machine.state(), S::PostcopyPaused);
    let mut machine = starting(&[]);
    let other = machine.handle(NOW, E::StatusAsked(MigrationId([8; 16]))).expect("not refused");
    assert_eq!((other, machine.state()), (vec![A::Answer(Status::Unknown)], S::Committed));
}

#[test]
fn start_that_fails_after_a_loss_gives_the_guest_back_only_if_its_source_knows_nothing() {
    use dst::{Action as A, Event as E, State as S};
    let mut machine = starting(&[E::ConnectionLost]);
    machine.handle(NOW, E::GuestStartFailed).expect("not refused");
    machine.handle(NOW, E::HooksGivenBack).expect("not refused");
    assert_eq!((machine.state(), machine.status(ID)), (S::Failed, Status::Never));

    for said in [
        &[E::ConnectionLost, E::StatusAsked(ID)][..],
        &[E::StatusAsked(ID)],
        &[E::PauseRequested],
        &[E::ConnectionLost, E::ChannelsClosed, E::RecoveryBegun],
        &[E::ConnectionLost, E::ChannelsClosed, E::RecoveryBegun, E::ResumeRead],
    ] {
        let mut machine = starting(said);
        let failed = machine.handle(NOW, E::GuestStartFailed).expect("not refused");
        assert_eq!(failed, [A::ReportHeld(dst::Held::StartInPostcopy), A::TakeOverPaused], "{said:?}");
        assert!(!machine.may_guest_run(), "{said:?}: not taken over yet");
        let taken = machine.handle(NOW, E::GuestStarted).expect("not refused");
        assert_eq!(taken, [A::SayStarted, A::AnnounceNetwork], "{said:?}");
        assert!(machine.is_taken_over_paused() && machine.may_guest_run(), "{said:?}");
        machine.handle(NOW, E::PagesComplete).expect("not refused");
        assert_eq!((machine.state(), machine.status(ID)), (S::Paused, Status::Committed), "{said:?}");
    }
}

#[test]
fn start_that_fails_over_its_connection_gives_the_guest_back() {
    use dst::{Event as E, State as S};
    for before in [&[][..], &[E::EofRead], &[E::EofRead, E::PagesComplete]] {
        let mut machine = starting(before);
        machine.handle(NOW, E::GuestStartFailed).expect("not refused");
        machine.handle(NOW, E::HooksGivenBack).expect("not refused");
        assert_eq!(machine.state(), S::Failed, "{before:?}");
    }
}
