//! A protected guest: leases, claims and last answers, event by event.

use std::time::Duration;
use sterna_proto::replica::primary::{self, Primary};
use sterna_proto::replica::standby::{self, Standby};
use sterna_proto::replica::{Answer, BadTerms, Protection, Ruling, Terms};

const OURS: Protection = Protection { id: [7; 16], generation: 3 };
const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(200),
    lease: Duration::from_secs(2),
    drift_per_mille: 10,
    margin: Duration::from_millis(500),
    claim_interval: Duration::from_secs(1),
};

const HAND_OVER: primary::Event = primary::Event::HandOver { is_arbiter_in_reach: true };

fn prepared(is_arbiter_in_reach: bool) -> standby::Event {
    standby::Event::Prepared { is_arbiter_in_reach }
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn answer(held: u64, heartbeat: u64) -> primary::Event {
    primary::Event::Answered(Answer { protection: OURS, held, heartbeat })
}

/// A primary at 0 ms that has taken checkpoint 1 and sent heartbeat 1.
fn protected() -> Primary {
    let config = primary::Config { protection: OURS, terms: TERMS, in_flight: 2 };
    let mut machine = Primary::new(config, ms(0));
    let beat = machine.handle(ms(0), primary::Event::Tick);
    assert_eq!(beat, Ok(vec![primary::Action::SendHeartbeat(1)]));
    machine.handle(ms(0), primary::Event::CheckpointTaken(1)).expect("not refused");
    machine
}

/// A standby at 0 ms that has stored checkpoint 1.
fn following(needs_fence: bool) -> Standby {
    let mut machine = Standby::new(standby::Config { protection: OURS, terms: TERMS, needs_fence });
    machine.handle(ms(0), standby::Event::CheckpointHeld(1)).expect("not refused");
    machine
}

#[test]
fn what_was_said_leaves_when_its_checkpoint_is_held() {
    let mut machine = protected();
    assert!(!machine.may_say(ms(1), 1));

    let actions = machine.handle(ms(10), answer(1, 1));

    assert_eq!(actions, Ok(vec![primary::Action::Release(1)]));
    assert!(machine.may_say(ms(10), 1));
    assert!(!machine.may_say(ms(10), 2));
    assert!(!machine.may_say(ms(2_000), 1), "the lease is over");
}

#[test]
fn lease_counts_from_when_the_heartbeat_was_sent() {
    let mut machine = protected();
    assert_eq!(machine.handle(ms(200), primary::Event::Tick), Ok(vec![primary::Action::SendHeartbeat(2)]));

    machine.handle(ms(1_900), answer(1, 2)).expect("not refused");

    assert!(machine.may_say(ms(2_199), 1));
    assert!(!machine.may_say(ms(2_200), 1));
}

#[test]
fn lease_that_is_over_is_seen_before_the_answer_that_comes_too_late() {
    let mut machine = protected();

    let actions = machine.handle(ms(3_600_000), answer(1, 1)).expect("not refused");

    use primary::Action::{Claim, CloseChannels, StopGuest};
    assert_eq!(actions, [StopGuest, CloseChannels, Claim]);
    assert!(!machine.may_guest_run(ms(3_600_000)));
    assert_eq!(machine.cause(), Some(primary::Cause::LeaseOver));
}

#[test]
fn guest_whose_lease_ended_in_a_pause_may_not_run_before_any_event_says_so() {
    let mut machine = protected();
    assert!(machine.may_guest_run(ms(1_999)));

    assert!(!machine.may_guest_run(ms(2_000)));

    let actions = machine.handle(ms(2_001), answer(1, 1)).expect("not refused");
    assert_eq!(actions[0], primary::Action::StopGuest, "what the query said is ordered next");
    machine.handle(ms(9_000), primary::Event::Ruled(Ruling::Won)).expect("not refused");
    assert!(machine.may_guest_run(ms(9_000)), "no lease is needed any more");
}

#[test]
fn guest_may_run_until_the_last_checkpoint_of_a_planned_takeover_is_taken() {
    let mut machine = protected();
    machine.handle(ms(2), answer(1, 1)).expect("not refused");
    machine.handle(ms(3), HAND_OVER).expect("not refused");
    assert!(machine.may_guest_run(ms(3)));

    machine.handle(ms(4), primary::Event::LastCheckpointTaken(2)).expect("not refused");

    assert!(!machine.may_guest_run(ms(4)));
}

#[test]
fn answer_of_another_protection_changes_nothing() {
    let mut machine = protected();
    for protection in [Protection { generation: 2, ..OURS }, Protection { id: [8; 16], ..OURS }] {
        let stray = primary::Event::Answered(Answer { protection, held: 1, heartbeat: 1 });
        assert_eq!(machine.handle(ms(1), stray), Ok(vec![]));
        assert_eq!(machine.handle(ms(1), primary::Event::Never(protection)), Ok(vec![]));
        assert_eq!(machine.handle(ms(1), primary::Event::StandbyRuns(protection)), Ok(vec![]));
    }
    assert_eq!((machine.held(), machine.state()), (0, primary::State::Protected));
}

#[test]
fn standby_that_acknowledges_what_was_never_sent_loses_contact() {
    for lie in [answer(2, 1), answer(1, 2)] {
        let mut machine = protected();
        let actions = machine.handle(ms(1), lie).expect("not refused");
        assert_eq!(actions, [primary::Action::CloseChannels, primary::Action::Claim]);
        assert!(machine.may_guest_run(ms(1)), "the lease lasts");
    }
}

#[test]
fn failure_before_the_first_checkpoint_leaves_the_guest_as_it_was() {
    let config = primary::Config { protection: OURS, terms: TERMS, in_flight: 1 };
    let mut machine = Primary::new(config, ms(0));

    let actions = machine.handle(ms(9), primary::Event::ConnectionLost).expect("not refused");

    let failed = primary::Outcome::Failed(primary::Cause::ConnectionLost);
    use primary::Action::{CloseChannels, Finish, OpenGate};
    assert_eq!(actions, [CloseChannels, OpenGate, Finish(failed)]);
    assert!(machine.may_guest_run(ms(9)) && machine.may_say(ms(9), 1));
}

#[test]
fn arbiter_out_of_reach_is_asked_again_with_the_guest_stopped_after_the_lease() {
    use primary::Action::{Claim, Finish, OpenGate, ResumeGuest, StopGuest};
    let mut machine = protected();
    machine.handle(ms(100), primary::Event::ConnectionLost).expect("not refused");

    assert_eq!(machine.handle(ms(1_500), primary::Event::ArbiterOutOfReach), Ok(vec![]));
    assert_eq!(machine.deadline(), Some(ms(2_000)));
    assert_eq!(machine.handle(ms(2_000), primary::Event::Tick), Ok(vec![StopGuest]));
    assert_eq!(machine.deadline(), Some(ms(2_500)));
    assert_eq!(machine.handle(ms(2_500), primary::Event::Tick), Ok(vec![Claim]));

    let alone = primary::Outcome::Alone(primary::Because::Claim);
    let won = machine.handle(ms(2_600), primary::Event::Ruled(Ruling::Won));
    assert_eq!(won, Ok(vec![OpenGate, ResumeGuest, Finish(alone)]));
}

#[test]
fn checkpoint_beyond_what_may_be_in_flight_is_refused() {
    let mut machine = protected();
    machine.handle(ms(1), primary::Event::CheckpointTaken(2)).expect("two may be in flight");
    assert!(!machine.may_take_checkpoint());
    let refused = machine.handle(ms(2), primary::Event::CheckpointTaken(3));
    assert_eq!(refused, Err(primary::Refusal::TooManyInFlight { in_flight: 2 }));
    let refused = machine.handle(ms(2), primary::Event::CheckpointTaken(5));
    assert_eq!(refused, Err(primary::Refusal::CheckpointOutOfOrder { taken: 5, expected: 3 }));
}

#[test]
fn planned_takeover_gives_the_guest_when_its_last_checkpoint_is_held() {
    use primary::Action::{Release, SendGive, TakeLastCheckpoint};
    let mut machine = protected();
    let refused = machine.handle(ms(1), HAND_OVER);
    assert!(matches!(refused, Err(primary::Refusal::CannotHandOver { .. })), "nothing is held yet");
    machine.handle(ms(2), answer(1, 1)).expect("not refused");

    let unasked = machine.handle(ms(3), primary::Event::HandOver { is_arbiter_in_reach: false });
    assert_eq!(unasked, Err(primary::Refusal::ArbiterOutOfReach));
    assert_eq!((machine.state(), machine.may_guest_run(ms(3))), (primary::State::Protected, true));
    assert_eq!(machine.handle(ms(3), HAND_OVER), Ok(vec![TakeLastCheckpoint]));
    assert_eq!(machine.handle(ms(4), primary::Event::LastCheckpointTaken(2)), Ok(vec![]));
    assert_eq!(machine.handle(ms(5), answer(2, 1)), Ok(vec![Release(2), SendGive]));
    assert!(!machine.may_guest_run(ms(5)));

    machine.handle(ms(6), primary::Event::StandbyRuns(OURS)).expect("not refused");
    assert_eq!(machine.state(), primary::State::HandedOver);
}

#[test]
fn takeover_that_comes_to_nothing_while_its_checkpoint_is_taken_resumes_the_guest() {
    let mut machine = protected();
    machine.handle(ms(2), answer(1, 1)).expect("not refused");
    machine.handle(ms(3), HAND_OVER).expect("not refused");
    machine.handle(ms(4), primary::Event::Never(OURS)).expect("not refused");

    let actions = machine.handle(ms(5), primary::Event::LastCheckpointTaken(2));

    assert_eq!(actions, Ok(vec![primary::Action::ResumeGuest]));
}

#[test]
fn standby_waits_longer_than_any_lease_that_its_answer_can_give() {
    let mut machine = following(false);
    machine.handle(ms(300), standby::Event::Heartbeat(OURS, 1)).expect("not refused");
    machine.handle(ms(310), standby::Event::ConnectionLost).expect("not refused");

    assert_eq!(TERMS.patience(), ms(2_520));
    assert_eq!(machine.deadline(), Some(ms(2_820)));
    assert_eq!(machine.handle(ms(2_819), standby::Event::Tick), Ok(vec![]));
    assert_eq!(machine.handle(ms(2_820), standby::Event::Tick), Ok(vec![standby::Action::Prepare(1)]));
    assert_eq!(machine.handle(ms(2_830), prepared(true)), Ok(vec![standby::Action::Claim]));
}

#[test]
fn checkpoints_do_not_stand_for_heartbeats() {
    let mut machine = following(false);
    machine.handle(ms(300), standby::Event::Heartbeat(OURS, 1)).expect("not refused");
    // The thread that sends heartbeats is dead, but the guest's process still runs.
    for (at, number) in [(1_000, 2), (2_000, 3), (2_800, 4)] {
        let held = machine.handle(ms(at), standby::Event::CheckpointHeld(number)).expect("not refused");
        assert!(matches!(held[..], [standby::Action::SendAnswer(Answer { heartbeat: 1, .. })]), "{held:?}");
    }
    assert_eq!(machine.deadline(), Some(ms(2_820)));
}

#[test]
fn standby_answers_nothing_once_its_patience_is_over() {
    let mut machine = following(false);

    let actions = machine.handle(ms(60_000), standby::Event::Heartbeat(OURS, 9)).expect("not refused");

    assert_eq!(actions, [standby::Action::CloseChannels, standby::Action::Prepare(1)]);
    assert_eq!(machine.handle(ms(60_001), standby::Event::Heartbeat(OURS, 10)), Ok(vec![]));
    assert_eq!(machine.handle(ms(60_001), standby::Event::CheckpointHeld(2)), Ok(vec![]));
    assert_eq!(machine.held(), 1);
}

#[test]
fn patience_begins_anew_with_the_first_checkpoint() {
    use standby::{Event, State};
    // The primary was frozen during the seeding, after a heartbeat. Its lease begins when it takes
    // checkpoint 1.
    let mut machine = Standby::new(standby::Config { protection: OURS, terms: TERMS, needs_fence: false });
    machine.handle(ms(1), Event::Heartbeat(OURS, 1)).expect("not refused");

    machine.handle(ms(25_000), Event::CheckpointHeld(1)).expect("not refused");

    assert_eq!(machine.deadline(), Some(ms(27_520)));
    machine.handle(ms(27_519), Event::Tick).expect("not refused");
    assert_eq!(machine.state(), State::Following);
    machine.handle(ms(27_520), Event::Tick).expect("not refused");
    assert_eq!(machine.state(), State::Preparing);
}

#[test]
fn guest_of_a_qemu_is_started_only_after_the_fence() {
    use standby::{Action, Event, State};
    let mut machine = following(true);
    machine.handle(ms(5_000), Event::Tick).expect("not refused");
    machine.handle(ms(5_000), prepared(true)).expect("not refused");
    assert_eq!(machine.handle(ms(5_001), Event::Ruled(Ruling::Won)), Ok(vec![Action::Fence]));
    assert_eq!(machine.handle(ms(5_002), Event::FenceFailed), Ok(vec![]));
    assert_eq!(machine.state(), State::Unfenced);
    assert_eq!(machine.handle(ms(5_003), Event::Retry), Ok(vec![Action::Fence]));
    assert_eq!(machine.handle(ms(5_004), Event::Fenced), Ok(vec![Action::Start]));
    assert_eq!(machine.handle(ms(5_005), Event::StartFailed), Ok(vec![]));
    assert_eq!(machine.handle(ms(5_006), Event::Retry), Ok(vec![Action::Start]));
}

#[test]
fn standby_that_cannot_start_what_it_was_given_says_so() {
    use standby::{Action, Because, Event, Outcome};
    let mut machine = following(true);
    assert_eq!(machine.handle(ms(1), Event::GiveRead(OURS)), Ok(vec![Action::Prepare(1)]));

    let actions = machine.handle(ms(2), Event::PrepareFailed).expect("not refused");

    let finish = Action::Finish(Outcome::Discarded(Because::LocalFailure));
    assert_eq!(actions, [Action::SendNever, Action::CloseChannels, Action::Discard, finish]);
}

#[test]
fn given_guest_goes_back_if_its_standby_finds_no_arbiter_and_has_claimed_nothing() {
    use standby::{Action, Because, Event, Outcome, State};
    let mut machine = following(false);
    machine.handle(ms(1), Event::GiveRead(OURS)).expect("not refused");

    let actions = machine.handle(ms(2), prepared(false)).expect("not refused");

    let finish = Action::Finish(Outcome::Discarded(Because::ArbiterOutOfReach));
    assert_eq!(actions, [Action::SendNever, Action::CloseChannels, Action::Discard, finish]);

    // If contact with the primary is lost, the guest cannot be returned: the standby asks the
    // arbiter until it rules.
    let mut machine = following(false);
    machine.handle(ms(5_000), Event::Tick).expect("not refused");
    assert_eq!(machine.handle(ms(5_001), prepared(false)), Ok(vec![Action::Claim]));
    // After the arbiter was asked once, the claim may have been made.
    let mut machine = following(false);
    machine.handle(ms(1), Event::GiveRead(OURS)).expect("not refused");
    assert_eq!(machine.handle(ms(2), prepared(true)), Ok(vec![Action::Claim]));
    assert_eq!(machine.handle(ms(3), Event::ArbiterOutOfReach), Ok(vec![]));
    assert_eq!(machine.state(), State::Claiming);
}

#[test]
fn operator_is_told_what_is_impossible() {
    use standby::{Event, Refusal};
    let config = standby::Config { protection: OURS, terms: TERMS, needs_fence: false };
    let planned = Event::TakeOver { is_planned: true, is_arbiter_in_reach: true };
    assert_eq!(Standby::new(config).handle(ms(0), planned), Err(Refusal::NothingHeld));
    let mut machine = following(false);
    let unasked = Event::TakeOver { is_planned: true, is_arbiter_in_reach: false };
    assert_eq!(machine.handle(ms(1), unasked), Err(Refusal::ArbiterOutOfReach));
    assert_eq!(machine.state(), standby::State::Following);
    machine.handle(ms(1), Event::ConnectionLost).expect("not refused");
    assert_eq!(machine.handle(ms(2), planned), Err(Refusal::NoContact));
    assert!(matches!(machine.handle(ms(2), Event::Retry), Err(Refusal::NothingWaits { .. })));
}

#[test]
fn terms_that_one_lost_heartbeat_would_end_are_refused() {
    assert_eq!(TERMS.check(), Ok(()));
    assert_eq!(Terms::default().check(), Ok(()));
    let short = Terms { lease: ms(500), ..TERMS };
    assert!(matches!(short.check(), Err(BadTerms::Heartbeat { .. })));
    assert_eq!(Terms { margin: ms(0), ..TERMS }.check(), Err(BadTerms::NoMargin));
    assert_eq!(Terms { claim_interval: ms(0), ..TERMS }.check(), Err(BadTerms::NoClaimInterval));
}

#[test]
fn guest_that_has_ended_is_taken_over_without_waiting_for_the_lease() {
    use primary::Action::{CloseChannels, DestroyGuest, DropOutput, Finish, SendGone, StopGuest};
    let mut machine = protected();
    let actions = machine.handle(ms(1), primary::Event::GuestGone).expect("not refused");
    let lost = Finish(primary::Outcome::Lost);
    assert_eq!(actions, [SendGone, StopGuest, CloseChannels, DropOutput, DestroyGuest, lost]);
    assert!(!machine.may_guest_run(ms(1)) && !machine.may_say(ms(1), 1));

    let mut machine = following(true);
    let actions = machine.handle(ms(1), standby::Event::GoneRead(OURS)).expect("not refused");
    assert_eq!(actions, [standby::Action::CloseChannels, standby::Action::Prepare(1)]);
    // The claim and the fence follow in the usual order.
    let claims = machine.handle(ms(2), prepared(true));
    assert_eq!(claims, Ok(vec![standby::Action::Claim]));
    let fences = machine.handle(ms(3), standby::Event::Ruled(Ruling::Won));
    assert_eq!(fences, Ok(vec![standby::Action::Fence]));
}

#[test]
fn guest_that_ends_after_contact_was_lost_is_not_claimed_any_more() {
    use primary::Action::{DestroyGuest, DropOutput, Finish, StopGuest};
    let mut machine = protected();
    machine.handle(ms(1), primary::Event::ConnectionLost).expect("not refused");
    machine.handle(ms(2), primary::Event::ArbiterOutOfReach).expect("not refused");

    let actions = machine.handle(ms(3), primary::Event::GuestGone).expect("not refused");

    assert_eq!(actions, [StopGuest, DropOutput, DestroyGuest, Finish(primary::Outcome::Lost)]);
    assert_eq!(machine.handle(ms(10_000), primary::Event::Tick), Ok(vec![]));
}

#[test]
fn end_of_the_guest_of_another_protection_changes_nothing() {
    let mut machine = following(true);
    let stray = standby::Event::GoneRead(Protection { generation: 2, ..OURS });
    assert_eq!(machine.handle(ms(1), stray), Ok(vec![]));
    assert_eq!(machine.state(), standby::State::Following);
}

#[test]
fn guest_that_ends_while_its_operator_ends_the_protection_is_not_taken_over() {
    let mut machine = protected();
    machine.handle(ms(1), answer(1, 1)).expect("not refused");
    machine.handle(ms(2), primary::Event::Unprotect).expect("not refused");
    assert_eq!(machine.handle(ms(3), primary::Event::GuestGone), Ok(vec![]));
}
