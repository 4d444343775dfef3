//! Both machines along a migration without failures.

use std::time::Duration;
use sterna_proto::destination::{self as dst, Destination};
use sterna_proto::source::{self as src, Source};
use sterna_proto::{MigrationId, Status};

const NOW: Duration = Duration::ZERO;
const ID: MigrationId = MigrationId([7; 16]);

fn source(config: src::Config) -> impl FnMut(src::Event) -> Vec<src::Action> {
    let mut machine = Source::new(config, NOW);
    move |event| machine.handle(NOW, event).expect("not refused")
}

#[test]
fn source_with_sterna_peer_prepares_commits_and_completes() {
    use src::{Action as A, Event as E};
    let mut tell = source(src::Config {
        return_path: true,
        compatibility: true,
        pause_before_switchover: true,
        ..Default::default()
    });
    let peer = src::Peer { sterna: true, features: 1 };
    assert_eq!(tell(E::ChannelsReady), [A::Identify]);
    assert_eq!(tell(E::PeerIdentified(peer)), [A::SendHandoverId, A::Compare]);
    assert_eq!(tell(E::CompatibilityAccepted), [A::StartPrecopy]);
    let go = E::SwitchoverRequested { guest_running: true };
    assert_eq!(tell(go), [A::StopGuest]);
    assert_eq!(tell(E::GuestStopped { was_running: true }), []);
    assert_eq!(tell(E::OperatorContinue), [A::ReleaseHooks]);
    assert_eq!(tell(E::HooksReleased), [A::SendFinalState]);
    assert_eq!(tell(E::FinalStateSent), [A::SendPrepare]);
    assert_eq!(tell(E::PrepareAcknowledged), [A::SendEof]);
    assert_eq!(tell(E::EofSent), []);
    let outcome =
        src::Outcome { end: src::End::Completed, guest: src::GuestAfter::Given, tracking_left_on: false };
    assert_eq!(tell(E::Shut(0)), [A::CloseChannels, A::StopTracking, A::Finish(outcome)]);
}

#[test]
fn source_identifies_again_a_peer_that_has_made_its_vm_and_configures_it_once() {
    use src::{Action as A, Event as E};
    let mut machine = Source::new(src::Config { return_path: true, ..Default::default() }, NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    assert_eq!(tell(E::ChannelsReady), [A::Identify]);
    assert_eq!(tell(E::ConfigurationWanted), [A::Configure]);
    assert_eq!(tell(E::ConfigurationAccepted), [A::Identify]);
    let mut again = machine.clone();
    let peer = src::Peer { sterna: true, features: 1 };
    let begun = machine.handle(NOW, E::PeerIdentified(peer));
    assert_eq!(begun.expect("not refused"), [A::SendHandoverId, A::StartPrecopy]);

    let refused = again.handle(NOW, E::ConfigurationWanted).expect("not refused");
    assert_eq!(refused.first(), Some(&A::CloseChannels));
    assert_eq!(again.failure(), Some(src::Cause::PeerMisbehaved));
}

#[test]
fn source_without_return_path_completes_when_eof_is_sent() {
    use src::{Action as A, Event as E};
    let mut tell = source(src::Config::default());
    assert_eq!(tell(E::ChannelsReady), [A::StartPrecopy]);
    let go = E::SwitchoverRequested { guest_running: true };
    assert_eq!(tell(go), [A::StopGuest]);
    assert_eq!(tell(E::GuestStopped { was_running: true }), [A::ReleaseHooks]);
    assert_eq!(tell(E::HooksReleased), [A::SendFinalState]);
    assert_eq!(tell(E::FinalStateSent), [A::SendEof]);
    assert!(matches!(tell(E::EofSent)[..], [.., A::Finish(_)]));
}

#[test]
fn destination_with_sterna_source_runs_after_eof_and_then_says_shut() {
    use dst::{Action as A, Event as E};
    let mut machine = Destination::new(dst::Config::default(), NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    assert_eq!(tell(E::ChannelsReady), []);
    assert_eq!(tell(E::ReturnPathOpened), []);
    assert_eq!(tell(E::HandoverIdRead(ID)), []);
    assert_eq!(tell(E::PrepareRead), [A::FinishLoading]);
    assert_eq!(tell(E::LoadComplete { run: true }), [A::AcquireHooks]);
    assert_eq!(tell(E::HooksAcquired), [A::SendPong]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Pending)]);
    assert_eq!(tell(E::EofRead), [A::StartGuest]);
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Pending)]);
    assert_eq!(
        tell(E::GuestStarted),
        [A::SendShut(0), A::AnnounceNetwork, A::CloseChannels, A::Finish(dst::Outcome::Running)]
    );
    assert_eq!(tell(E::StatusAsked(ID)), [A::Answer(Status::Committed)]);
}

#[test]
fn destination_managed_with_qemu_source_starts_only_on_cont() {
    use dst::{Action as A, Event as E};
    let config = dst::Config { managed: true, ..Default::default() };
    let mut machine = Destination::new(config, NOW);
    let mut tell = |event| machine.handle(NOW, event).expect("not refused");
    tell(E::ChannelsReady);
    tell(E::ReturnPathOpened);
    assert_eq!(tell(E::EofRead), [A::FinishLoading]);
    assert_eq!(tell(E::LoadComplete { run: true }), [A::AcquireHooks]);
    assert_eq!(
        tell(E::HooksAcquired),
        [A::SendShut(0), A::CloseChannels, A::ReportHeld(dst::Held::UntilSourceCompleted)]
    );
    assert_eq!(tell(E::ConnectionLost), []);
    assert_eq!(tell(E::OperatorCont), [A::AcquireHooks]);
    assert_eq!(tell(E::HooksAcquired), [A::StartGuest]);
    assert_eq!(tell(E::GuestStarted), [A::AnnounceNetwork, A::Finish(dst::Outcome::Running)]);
}
