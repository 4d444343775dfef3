//! A lost acknowledgement: the guest never runs twice, and the source asks the destination for its status.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support;
use crate::support::destination::{HandMade, Reply, Seen, sterna as like_sterna};
use crate::support::proxy::{Line, Proxy, Verdict, Way, at_pattern};
use crate::support::{TestVm, assert_failed, assert_next_works, assert_reset, case, until_status, vm, vms};
use sterna::{
    Arrival, Capabilities, Decision, Event, Incoming, Migration, Outcome, Parameters, Status,
    StatusQuestions, Vm, Waited,
};
use sterna_proto::source::Refusal;
use sterna_wire::extension::{Handover, MigrationSecret, StatusAnswer, StatusQuestion};

/// SHUT with any value.
const SHUT: &[u8] = &[0, 1, 0, 4, 0, 0, 0];

fn settings() -> (Parameters, Capabilities) {
    common::multifd(2)
}

/// Migrates through a proxy that cuts the connection instead of forwarding the acknowledgement.
fn lose_acknowledgement(
    source: &Arc<TestVm>,
    target: &Arc<TestVm>,
    log: &Arc<common::Log>,
) -> (Incoming, Proxy, Migration) {
    let (params, capabilities) = settings();
    let incoming = vm::listen(target, &params, capabilities);
    let proxy = Proxy::new(&incoming.address(), at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut));
    proxy.refuse(false);
    let migration = vm::start(source, &proxy.address(), &params, capabilities, Arc::clone(log) as _);
    (incoming, proxy, migration)
}

#[test]
fn lost_acknowledgement_is_asked_for_and_completes() {
    case("lost", || {
        let (source, target) = vms();
        let log = Arc::default();
        let (incoming, _proxy, migration) = lose_acknowledgement(&source, &target, &log);
        let outcome = migration.wait();
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
        assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
        assert_eq!(migration.status(), Status::Completed);
        assert_eq!(migration.statistics().error, None, "it succeeded");
        assert!(!migration.may_guest_run());
        assert_eq!(*source.resumes.lock().unwrap(), 0);
    });
}

#[test]
fn waiting_vmm_learns_that_the_migration_is_undecided_and_then_how_it_ended() {
    case("waiting while undecided", || {
        let (source, target) = vms();
        let (params, capabilities) = settings();
        let params = Parameters { status_questions: StatusQuestions::Operator, ..params };
        let incoming = vm::listen(&target, &params, capabilities);
        let filter = at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut);
        let proxy = Proxy::new(&incoming.address(), filter);
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::new(()));
        let waited = migration.wait_timeout(support::PATIENCE);
        assert!(matches!(waited, Waited::Undecided), "{waited:?}");
        let began = std::time::Instant::now();
        let waited = migration.wait_timeout(Duration::from_millis(30));
        assert!(matches!(waited, Waited::Undecided), "{waited:?}");
        assert!(began.elapsed() >= Duration::from_millis(30), "a VMM that waits in a loop sleeps");
        migration.decide(Decision::DestinationRuns).expect("undecided");
        let waited = migration.wait_timeout(support::PATIENCE);
        let Waited::Ended(outcome) = waited else { panic!("{waited:?}") };
        common::assert_arrived(&outcome, &incoming.wait(), &target.guest);
    });
}

#[test]
fn destination_that_settles_answers_the_question_and_releases_everything() {
    case("settling", || {
        let (source, target) = vms();
        let log = Arc::default();
        let (incoming, _proxy, migration) = lose_acknowledgement(&source, &target, &log);
        let at = incoming.address();
        let arrival = incoming.settle(Duration::from_secs(3));
        common::assert_arrived(&migration.wait(), &arrival, &target.guest);
        assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
        drop(sterna_transport::Listener::bind(&at).expect("the port is free"));
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
        let names: Vec<_> = names.map(|name| name.trim().to_owned()).collect();
        for role in ["incoming", "listener", "loader", "greeter"] {
            assert!(!names.iter().any(|name| name == role), "{names:?}");
        }
    });
}

#[test]
fn lost_refusal_is_asked_for_and_the_source_resumes() {
    case("lost refusal", || {
        let (source, target) = vms();
        vm::order(&target.fail_start, true);
        let log = Arc::default();
        let (incoming, _proxy, migration) = lose_acknowledgement(&source, &target, &log);
        let outcome = migration.wait();
        assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
        assert_failed(&outcome, &incoming.wait(), &source, &target);
        vm::order(&target.fail_start, false);
        assert_next_works(&source, &target);
    });
}

#[test]
fn question_over_an_inherited_descriptor_leaves_its_number_to_others() {
    use std::os::fd::AsRawFd as _;
    case("question over fd", || {
        let (source, target) = vms();
        let (params, capabilities) = (common::parameters(), Capabilities::default());
        let incoming = vm::listen(&target, &params, capabilities);
        let filter = at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut);
        let proxy = Proxy::new(&incoming.address(), filter);
        let socket = std::net::TcpStream::connect(("127.0.0.1", support::port(&proxy.address()))).unwrap();
        let number = socket.as_raw_fd();
        let to = sterna::Address::Handed(sterna::HandedFd::new(socket.into(), "socket"));
        let migration = vm::start(&source, &to, &params, capabilities, Arc::new(()));
        // One of these descriptors gets the first number that becomes free when the migration has closed its own. If
        // a thread of the engine is faster, this run proves less.
        let mut others = Vec::new();
        for _ in 0..100 {
            let pair = std::os::unix::net::UnixStream::pair().unwrap();
            let found = pair.0.as_raw_fd() == number || pair.1.as_raw_fd() == number;
            others.push(pair);
            if found {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        until_status(&migration, Status::Undecided);
        std::thread::sleep(params.limits.ask_interval * 4);
        for (mut one, mut other) in others.drain(..) {
            one.write_all(b"?").expect("a stranger's connection was closed");
            other.read_exact(&mut [0]).expect("a stranger's connection was closed");
        }
        assert_eq!(migration.status(), Status::Undecided);
        migration.decide(Decision::DestinationRuns).expect("undecided");
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    });
}

#[test]
fn migration_over_a_descriptor_that_is_named_leaves_it_open() {
    case("named", || {
        let (source, target) = vms();
        let (params, capabilities) = (common::parameters(), Capabilities::default());
        let incoming = vm::listen(&target, &params, capabilities);
        let mut socket =
            std::net::TcpStream::connect(("127.0.0.1", support::port(&incoming.address()))).unwrap();
        let to = sterna::Address::Fd(std::os::fd::AsRawFd::as_raw_fd(&socket).to_string());
        let migration = vm::start(&source, &to, &params, capabilities, Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
        drop(migration);
        // The migration has ended, and the descriptor is still a socket of this process.
        assert!(socket.local_addr().is_ok());
        let ended = socket.write_all(b"x").unwrap_err();
        assert_eq!(ended.kind(), std::io::ErrorKind::BrokenPipe, "{ended}");
    });
}

#[test]
fn multifd_over_one_inherited_descriptor_is_refused_at_the_start() {
    let (source, _) = vms();
    let (params, capabilities) = settings();
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let to = sterna::Address::Fd(std::os::fd::AsRawFd::as_raw_fd(&ours).to_string());
    let refused = Migration::start(source, &to, params, capabilities, Arc::new(())).err();
    let is_settings =
        |why| matches!(why, sterna::StartError::Settings(sterna::SettingsError::DescriptorIsOneChannel));
    assert!(refused.is_some_and(is_settings), "one descriptor, two channels");
    assert!(ours.peer_addr().is_ok(), "left to its owner");
}

/// An undecided migration whose destination stays unreachable.
fn unreachable(decision: Option<Decision>) {
    let (source, target) = vms();
    let log = Arc::new(common::Log::default());
    let (params, capabilities) = settings();
    let incoming = vm::listen(&target, &params, capabilities);
    let to = incoming.address();
    let proxy = Proxy::new(&to, at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut));
    let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::clone(&log) as _);
    // At this time every channel has passed the proxy; questions have not.
    support::eventually("commit", || {
        if log.events().contains(&Event::Status(Status::Active)) {
            proxy.refuse(true);
        }
        migration.status() == Status::Undecided
    });
    assert!(matches!(incoming.wait(), Arrival::Completed(_)));
    std::thread::sleep(params.limits.ask_interval * 4);
    assert_eq!(migration.status(), Status::Undecided);
    assert!(migration.outcome().is_none());
    assert!(!migration.may_guest_run());
    assert_eq!(sterna::SourceVm::run_state(source.as_ref()), sterna::RunState::Paused);
    assert!(matches!(migration.cancel(), Err(Refusal::CancelUndecided)), "it may run there");
    let warned = log.events();
    assert!(support::has_warning(&warned, &["undecided"]), "{warned:?}");
    match decision {
        Some(Decision::DestinationRuns) => {
            migration.decide(Decision::DestinationRuns).expect("undecided");
            let outcome = migration.wait();
            assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
            common::assert_lives_on(&target.guest);
            assert_eq!(*source.resumes.lock().unwrap(), 0);
        }
        Some(Decision::SourceRuns) => {
            // The operator first makes sure that the guest does not run there.
            target.guest.quit();
            migration.decide(Decision::SourceRuns).expect("undecided");
            let outcome = migration.wait();
            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
            common::assert_lives_on(&source.guest);
        }
        None => {
            // The network works again, so the answer arrives.
            proxy.refuse(false);
            let outcome = migration.wait();
            assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
            common::assert_lives_on(&target.guest);
        }
    }
    migration.decide(Decision::SourceRuns).expect_err("nothing to decide");
    migration.cancel().expect_err("over");
}

#[test]
fn unreachable_destination_leaves_it_undecided_until_it_answers() {
    case("comes back", || unreachable(None));
}

#[test]
fn operator_decides_for_the_destination() {
    case("destination runs", || unreachable(Some(Decision::DestinationRuns)));
}

#[test]
fn operator_decides_for_the_source() {
    case("source runs", || unreachable(Some(Decision::SourceRuns)));
}

#[test]
fn pending_and_unknown_are_no_answers() {
    case("pending", || {
        let (source, _) = vms();
        let peer = HandMade::new(Box::new(|seen| match seen {
            Seen::Eof => Reply::Close,
            other => like_sterna(other),
        }));
        let (params, capabilities) = settings();
        let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
        until_status(&migration, Status::Undecided);
        for answer in [None, Some(3), Some(77)] {
            peer.answers(answer);
            let before = peer.questions();
            support::eventually("questions", || peer.questions() > before + 2);
            assert_eq!(migration.status(), Status::Undecided, "{answer:?}");
        }
        peer.answers(Some(2));
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn silent_qemu_after_the_commit_leaves_it_to_the_operator() {
    case("silent", || {
        let (source, _) = vms();
        let peer = HandMade::except(|seen| (seen == Seen::Description).then_some(Reply::Nothing));
        let (_, capabilities) = settings();
        let migration = vm::start(&source, &peer.address(), &support::short(), capabilities, Arc::new(()));
        until_status(&migration, Status::Undecided);
        assert_eq!(peer.questions(), 0, "a QEMU cannot be asked");
        migration.decide(Decision::SourceRuns).expect("undecided");
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn destination_dropped_while_undecided_stays_undecided() {
    case("dropped", || {
        let (source, target) = vms();
        let (params, capabilities) = settings();
        let incoming = vm::listen(&target, &params, capabilities);
        let proxy =
            Proxy::new(&incoming.address(), at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut));
        let log = Arc::new(common::Log::default());
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::clone(&log) as _);
        support::eventually("commit", || {
            proxy.refuse(log.events().contains(&Event::Status(Status::Active)));
            migration.status() == Status::Undecided
        });
        drop(incoming);
        proxy.refuse(false);
        std::thread::sleep(params.limits.ask_interval * 4);
        assert_eq!(migration.status(), Status::Undecided);
        migration.decide(Decision::DestinationRuns).expect("undecided");
        assert!(matches!(migration.wait(), Outcome::Completed));
        common::assert_lives_on(&target.guest);
    });
}

#[test]
fn destination_dropped_before_the_commit_fails_it() {
    case("dropped early", || {
        let (source, target) = vms();
        let (mut params, capabilities) = settings();
        params.max_bandwidth_bytes = 1 << 20;
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        until_status(&migration, Status::Active);
        drop(incoming);
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
        support::eventually("reset", || {
            target.ram().blocks().iter().all(|b| b.resident_bytes().unwrap() == 0)
        });
        assert_reset(&target);
        assert_next_works(&source, &target);
    });
}

#[test]
fn decision_does_not_wait_for_a_question_that_hangs() {
    case("question hangs", || {
        let (source, _) = vms();
        let peer = HandMade::new(Box::new(|seen| match seen {
            Seen::Eof => Reply::Close,
            other => like_sterna(other),
        }));
        peer.hangs();
        let (mut params, capabilities) = settings();
        params.limits.acknowledge = std::time::Duration::from_secs(600);
        let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
        support::eventually("a question", || peer.questions() > 0);
        assert_eq!(migration.status(), Status::Undecided);
        migration.decide(Decision::SourceRuns).expect("undecided");
        support::eventually("the end", || migration.outcome().is_some());
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn answer_that_was_changed_on_the_way_is_not_believed() {
    case("changed", || {
        let (source, target) = vms();
        let (params, capabilities) = settings();
        let incoming = vm::listen(&target, &params, capabilities);
        let (lies, told) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
        let mut lose = at_pattern(Line::Main, Way::Back, SHUT, false, Verdict::Cut);
        let filter = {
            let (lies, told) = (Arc::clone(&lies), Arc::clone(&told));
            move |line, way, offset, piece: &mut Vec<u8>| {
                if (line, way) == (Line::Other, Way::Back) && piece.len() >= 12 && lies.load(Ordering::SeqCst)
                {
                    // The answer *never*: the destination does not run the guest, and never will.
                    piece[8..12].copy_from_slice(&[0, 0, 0, 2]);
                    told.fetch_add(1, Ordering::SeqCst);
                }
                lose(line, way, offset, piece)
            }
        };
        let proxy = Proxy::new(&incoming.address(), Box::new(filter));
        let log = Arc::new(common::Log::default());
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::clone(&log) as _);
        support::eventually("lies", || told.load(Ordering::SeqCst) > 2);
        assert!(!migration.may_guest_run(), "two guests run");
        assert_eq!(migration.status(), Status::Undecided);
        assert_eq!(sterna::SourceVm::run_state(source.as_ref()), sterna::RunState::Paused);
        let told = support::warnings(&log.events());
        // A warning has no type.
        assert_eq!(told.iter().filter(|text| text.contains("not believed")).count(), 1, "{told:?}");
        lies.store(false, Ordering::SeqCst);
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    });
}

#[test]
fn answer_to_another_question_is_not_believed() {
    case("replayed", || {
        let (source, _) = vms();
        let peer = HandMade::new(Box::new(|seen| match seen {
            Seen::Eof => Reply::Close,
            other => like_sterna(other),
        }));
        let (params, capabilities) = settings();
        peer.replays(true);
        let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::new(()));
        for answer in [1, 2] {
            peer.answers(Some(answer));
            // One question may have been read before the change. Later questions get the new answer.
            let before = peer.questions();
            support::eventually("questions", || peer.questions() > before + 2);
            assert_eq!(migration.status(), Status::Undecided, "{answer}");
        }
        peer.replays(false);
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

/// The bytes that an attacker on the network path reads, without TLS.
type Overheard = Arc<Mutex<Vec<u8>>>;

fn overhear(overheard: &Overheard) -> support::proxy::Filter {
    let overheard = Arc::clone(overheard);
    Box::new(move |line, way, _, piece| {
        if (line, way) == (Line::Main, Way::Forward) {
            overheard.lock().unwrap().extend_from_slice(piece);
        }
        Verdict::Pass
    })
}

fn handover_in(overheard: &Overheard) -> Handover {
    let bytes = overheard.lock().unwrap();
    let name = b"\x0fsterna/handover";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("a section");
    let body = &bytes[at + name.len() + 12..][..Handover::BODY_BYTES];
    Handover::decode(Handover::SECTION_VERSION, body).expect("a sound section")
}

/// Sends a question, and returns the bytes received until the end.
fn ask(incoming: &Incoming, question: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(("127.0.0.1", support::port(&incoming.address()))).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = socket.write_all(question);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    answer
}

fn bytes_of(question: &StatusQuestion) -> Vec<u8> {
    let mut bytes = Vec::new();
    question.encode(&mut bytes);
    bytes
}

/// A completed migration, and the content of its handover section.
fn overheard_migration(
    params: &Parameters,
    at_destination: &Parameters,
) -> (Arc<TestVm>, Incoming, Handover) {
    let (source, target) = vms();
    let (_, capabilities) = settings();
    let incoming = vm::listen(&target, at_destination, capabilities);
    let overheard = Overheard::default();
    let proxy = Proxy::new(&incoming.address(), overhear(&overheard));
    let migration = vm::start(&source, &proxy.address(), params, capabilities, Arc::new(()));
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    (target, incoming, handover_in(&overheard))
}

#[test]
fn question_without_the_secret_gets_no_answer() {
    case("unproven", || {
        let (params, _) = settings();
        let (_target, incoming, handover) = overheard_migration(&params, &params);
        let (id, secret) = (handover.migration_id, handover.secret.expect("version 2"));
        let mut old = b"STNQ\0\0\0\x01".to_vec();
        old.extend_from_slice(&id);
        assert_eq!(ask(&incoming, &old), b"", "version 1");
        let guessed = MigrationSecret::from_bytes([0; 32]);
        assert_eq!(ask(&incoming, &bytes_of(&StatusQuestion::new(id, [1; 16], &guessed, &None))), b"");
        let other = StatusQuestion::new([9; 16], [1; 16], &secret, &None);
        assert_eq!(ask(&incoming, &bytes_of(&other)), b"", "another migration");
        let of_tls = StatusQuestion::new(id, [1; 16], &secret, &Some([1; 32]));
        assert_eq!(ask(&incoming, &bytes_of(&of_tls)), b"", "made for a TLS session");

        let question = StatusQuestion::new(id, [1; 16], &secret, &None);
        let answer = ask(&incoming, &bytes_of(&question));
        let (answer, _) = StatusAnswer::decode(&answer).unwrap().expect("an answer");
        assert!(answer.is_authentic(&question, &secret, &None));
        assert_eq!(answer.status, sterna_wire::extension::Status::Committed);
    });
}

#[test]
fn questions_are_answered_while_silent_connections_flood() {
    case("flood", || {
        let (params, _) = settings();
        let (_target, incoming, handover) = overheard_migration(&params, &params);
        let (id, secret) = (handover.migration_id, handover.secret.expect("version 2"));
        let connect = || TcpStream::connect(("127.0.0.1", support::port(&incoming.address()))).unwrap();
        // More connections than are greeted at the same time; closed ones are replaced.
        let mut flood: std::collections::VecDeque<TcpStream> = (0..330).map(|_| connect()).collect();
        for round in 0..4_u8 {
            let question = StatusQuestion::new(id, [round; 16], &secret, &None);
            assert_eq!(ask(&incoming, &bytes_of(&question)).len(), StatusAnswer::BYTES, "round {round}");
            for _ in 0..40 {
                flood.pop_front();
                flood.push_back(connect());
            }
        }
    });
}

#[test]
fn source_that_leaves_it_to_its_operator_does_not_ask() {
    case("operator", || {
        let (source, _) = vms();
        let peer = HandMade::new(Box::new(|seen| match seen {
            Seen::Eof => Reply::Close,
            other => like_sterna(other),
        }));
        peer.answers(Some(2));
        let (mut params, capabilities) = settings();
        params.status_questions = StatusQuestions::Operator;
        let log = Arc::new(common::Log::default());
        let migration = vm::start(&source, &peer.address(), &params, capabilities, Arc::clone(&log) as _);
        until_status(&migration, Status::Undecided);
        std::thread::sleep(params.limits.ask_interval * 4);
        assert_eq!((peer.questions(), migration.status()), (0, Status::Undecided));
        let told = log.events();
        assert!(support::has_warning(&told, &["leaves the question to an operator"]), "{told:?}");
        migration.decide(Decision::SourceRuns).expect("undecided");
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn destination_that_leaves_it_to_the_operator_does_not_answer() {
    case("operator there", || {
        let (params, _) = settings();
        let there = Parameters { status_questions: StatusQuestions::Operator, ..params.clone() };
        let (_target, incoming, handover) = overheard_migration(&params, &there);
        let secret = handover.secret.expect("version 2");
        let question = StatusQuestion::new(handover.migration_id, [1; 16], &secret, &None);
        assert_eq!(ask(&incoming, &bytes_of(&question)), b"");
    });
}
