//! Migrations over TLS, and credentials that do not match.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::certificates::{Authority, Wanted, directory_of, good_directory};
use crate::common::{self, Log, assert_arrived, assert_lives_on, config, multifd, pair, parameters};
use crate::delay::{as_it_comes, network};
use crate::support;
use crate::support::proxy::{Proxy, Verdict, Way};
use crate::support::{eventually, vm, vms, warnings};
use sterna::{
    Authorization, Capabilities, Event, Fault, Incoming, Observer, Outcome, Parameters, Status, Tls,
    TlsCredentials, TlsEndpoint, Vm, WaitLimits,
};

fn tls(directory: &Path, endpoint: TlsEndpoint) -> Tls {
    Tls::new(Arc::new(TlsCredentials::from_directory(directory, endpoint, true).expect("credentials")))
}

fn with(params: &Parameters, tls: Tls) -> Parameters {
    Parameters { tls: Some(tls), ..params.clone() }
}

/// Asserts that a guest arrives with these settings, with TLS on both sides.
fn arrives(params: &Parameters, capabilities: Capabilities) {
    let directory = good_directory();
    let here = with(params, tls(directory.path(), TlsEndpoint::Client));
    let there = with(params, tls(directory.path(), TlsEndpoint::Server));
    arrives_between(&here, &there, capabilities);
}

fn arrives_between(here: &Parameters, there: &Parameters, capabilities: Capabilities) {
    let (source, target) = pair(&config());
    let incoming = common::listen(&target, there, capabilities);
    let migration = common::start(&source, &incoming.address(), here, capabilities, Arc::new(()));
    assert_arrived(&migration.wait(), &incoming.wait(), &target);
}

#[test]
fn tls_main_channel_alone_carries_a_writing_guest() {
    arrives(&parameters(), Capabilities::default());
}

#[test]
fn tls_multifd_carries_a_writing_guest_with_any_number_of_channels() {
    for channels in [1, 2, 8] {
        let (params, capabilities) = multifd(channels);
        arrives(&params, capabilities);
    }
}

#[test]
fn tls_without_return_path_carries_a_writing_guest() {
    let (params, capabilities) = multifd(2);
    arrives(&params, Capabilities { return_path: false, ..capabilities });
}

#[test]
fn tls_compressed_multifd_carries_a_writing_guest() {
    let (mut params, capabilities) = multifd(2);
    params.multifd_compression = sterna::Compression::Zstd;
    params.downtime_limit = Duration::from_secs(10);
    arrives(&params, capabilities);
}

/// Each handshake takes a second. In sequence, they would take longer than the destination waits for the main
/// channel.
#[test]
fn many_tls_channels_over_a_slow_line_connect_side_by_side() {
    const CHANNELS: u8 = 24;
    let directory = good_directory();
    let limits = WaitLimits { setup: Duration::from_secs(30), ..common::LIMITS };
    let (params, capabilities) = multifd(CHANNELS);
    let params = Parameters { limits, downtime_limit: Duration::from_secs(10), ..params };
    let there = with(&params, tls(directory.path(), TlsEndpoint::Server));
    let here = with(&params, tls(directory.path(), TlsEndpoint::Client));
    let (source, target) = pair(&config());
    let incoming = common::listen(&target, &there, capabilities);
    let delays = vec![Duration::from_secs(1); usize::from(CHANNELS) + 1];
    let address = network(&incoming.address(), delays, |_| Box::new(as_it_comes));
    let began = Instant::now();
    let migration = common::start(&source, &address, &here, capabilities, Arc::new(()));

    eventually("pages", || migration.statistics().rounds_begun > 0 || migration.status() == Status::Failed);

    // In sequence, the handshakes would take longer than this.
    assert!(began.elapsed() < Duration::from_secs(u64::from(CHANNELS)), "{:?}", began.elapsed());
    assert_arrived(&migration.wait(), &incoming.wait(), &target);
}

/// Asserts that the source fails with `words` and this fault, and that the destination reports `theirs` as a warning
/// and continues to wait.
fn refused(here: Option<Tls>, there: Option<Tls>, fault: Option<Fault>, words: &[&str], theirs: &str) {
    let (source, target) = vms();
    let (params, capabilities) = multifd(2);
    let waiting = Parameters { tls: there, ..params.clone() };
    let leaving = Parameters { tls: here, ..params };
    let events = Arc::new(Log::default());
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(target, &at, waiting, capabilities, events.clone()).expect("listening");

    let migration = vm::start(&source, &incoming.address(), &leaving, capabilities, Arc::new(()));
    let outcome = migration.wait();

    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.fault(), fault, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} in {error}");
    }
    let told = || warnings(&events.events()).iter().any(|text| text.contains(theirs));
    eventually(&format!("{theirs:?} in {:?}", warnings(&events.events())), told);
    assert_lives_on(&source.guest);
    assert_eq!(incoming.status(), Status::Setup, "the next one may come");
}

#[test]
fn wrong_authority_is_named_on_both_sides_and_the_guest_runs_on() {
    // Another authority may have the same name.
    for name in ["Test authority", "Other authority"] {
        let (one, other) = (good_directory(), directory_of(name));
        refused(
            Some(tls(one.path(), TlsEndpoint::Client)),
            Some(tls(other.path(), TlsEndpoint::Server)),
            Some(Fault::PeerIncompatible),
            &["tcp:", "the peer's certificate is refused", "not issued by an authority in ca-cert.pem"],
            "the peer refused this side's certificate",
        );
    }
}

#[test]
fn wrong_name_is_refused_with_the_names_that_would_do() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("Test authority");
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted { hosts: &["other.example"], ..Wanted::default() });
    refused(
        Some(tls(directory.path(), TlsEndpoint::Client)),
        Some(tls(directory.path(), TlsEndpoint::Server)),
        Some(Fault::PeerIncompatible),
        &["it is for other.example", "127.0.0.1", "expected host name"],
        "the peer refused this side's certificate",
    );
}

#[test]
fn tls_hostname_makes_another_name_do() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("Test authority");
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted { hosts: &["other.example"], ..Wanted::default() });
    authority.issue(directory.path(), &Wanted { is_server: false, ..Wanted::default() });
    let client = tls(directory.path(), TlsEndpoint::Client);
    let here = with(&parameters(), Tls { hostname: Some("other.example".to_owned()), ..client });
    let there = with(&parameters(), tls(directory.path(), TlsEndpoint::Server));

    arrives_between(&here, &there, Capabilities::default());
}

#[test]
fn certificate_without_alternative_name_is_refused_with_the_cure() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("Test authority");
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted { hosts: &[], name: "127.0.0.1", ..Wanted::default() });
    refused(
        Some(tls(directory.path(), TlsEndpoint::Client)),
        Some(tls(directory.path(), TlsEndpoint::Server)),
        Some(Fault::PeerIncompatible),
        &["has no subjectAltName", "ip_address"],
        "the peer refused this side's certificate",
    );
}

#[test]
fn client_without_certificate_is_refused_by_a_server_that_verifies() {
    let directory = good_directory();
    let bare = tempfile::tempdir().unwrap();
    std::fs::copy(directory.path().join("ca-cert.pem"), bare.path().join("ca-cert.pem")).unwrap();
    refused(
        Some(tls(bare.path(), TlsEndpoint::Client)),
        Some(tls(directory.path(), TlsEndpoint::Server)),
        Some(Fault::PeerIncompatible),
        &["client-cert.pem"],
        "sent no certificate",
    );
}

#[test]
fn client_that_is_not_authorised_is_refused_by_name() {
    let directory = good_directory();
    let server = Tls {
        authorization: Some(Authorization::only("CN=somebody else")),
        ..tls(directory.path(), TlsEndpoint::Server)
    };
    refused(
        Some(tls(directory.path(), TlsEndpoint::Client)),
        Some(server),
        None,
        &["log"],
        "C=GB,O=Example,CN=client",
    );
}

#[test]
fn revoked_client_is_refused() {
    let authority = Authority::new("Test authority");
    let own = tempfile::tempdir().unwrap();
    authority.write(own.path());
    authority.issue(own.path(), &Wanted { is_server: false, serial: 77, ..Wanted::default() });
    authority.issue(own.path(), &Wanted::default());
    let revoked = tls(own.path(), TlsEndpoint::Client);
    authority.revoke(own.path(), 77);
    refused(
        Some(revoked),
        Some(tls(own.path(), TlsEndpoint::Server)),
        Some(Fault::PeerIncompatible),
        &["revoked"],
        "revoked by ca-crl.pem",
    );
}

#[test]
fn client_of_a_revoked_intermediate_authority_is_refused() {
    let authority = Authority::new("Test authority");
    let own = tempfile::tempdir().unwrap();
    authority.write(own.path());
    authority.issue(own.path(), &Wanted::default());
    let between = authority.intermediate("Intermediate authority", 78);
    between.issue(own.path(), &Wanted { is_server: false, ..Wanted::default() });
    let client = tls(own.path(), TlsEndpoint::Client);
    let server = tls(own.path(), TlsEndpoint::Server);
    arrives_between(
        &with(&parameters(), client.clone()),
        &with(&parameters(), server),
        Capabilities::default(),
    );

    authority.revoke(own.path(), 78);
    let server = tls(own.path(), TlsEndpoint::Server);

    refused(Some(client), Some(server), Some(Fault::PeerIncompatible), &["revoked"], "revoked by ca-crl.pem");
}

#[test]
fn plain_source_to_a_tls_destination_is_told_apart() {
    let directory = good_directory();
    refused(None, Some(tls(directory.path(), TlsEndpoint::Server)), None, &[], "does not use TLS");
}

#[test]
fn tls_source_to_a_plain_destination_is_told_apart() {
    let directory = good_directory();
    refused(
        Some(tls(directory.path(), TlsEndpoint::Client)),
        None,
        None,
        &["closed during the TLS handshake", "no TLS credentials"],
        "the peer uses TLS and this side has no TLS credentials",
    );
}

/// The first handshake of a process took 10 s in a busy nested VM. All other first bytes have at most this limit.
#[test]
fn slow_handshake_has_the_setup_limit() {
    let directory = good_directory();
    let mut params = parameters();
    params.limits.setup = Duration::from_secs(30);
    let here = with(&params, tls(directory.path(), TlsEndpoint::Client));
    let there = with(&params, tls(directory.path(), TlsEndpoint::Server));
    let (source, target) = pair(&config());
    let incoming = common::listen(&target, &there, Capabilities::default());
    let begun = Instant::now();
    let slow = move |_, _, _, _: &mut Vec<u8>| match begun.elapsed() {
        passed if passed < Duration::from_secs(11) => Verdict::Later,
        _ => Verdict::Pass,
    };
    let proxy = Proxy::new(&incoming.address(), Box::new(slow));
    let migration = common::start(&source, &proxy.address(), &here, Capabilities::default(), Arc::new(()));
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_arrived(&outcome, &incoming.wait(), &target);
}

#[test]
fn silent_peer_ends_the_handshake_at_the_setup_limit() {
    let directory = good_directory();
    let (source, _) = vms();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", silent.local_addr().unwrap()).parse().unwrap();
    let params = with(&support::short(), tls(directory.path(), TlsEndpoint::Client));

    let migration = vm::start(&source, &to, &params, Capabilities::default(), Arc::new(()));
    let outcome = migration.wait();

    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let sterna::MigrationError::Transport(cause) = &error else { panic!("{error}") };
    let sterna_transport::TransportError::TimedOut { what, .. } = &**cause else { panic!("{error:?}") };
    assert_eq!(*what, "TLS handshake with");
    assert_lives_on(&source.guest);
}

#[test]
fn cancel_ends_a_handshake_with_a_silent_peer() {
    let directory = good_directory();
    let (source, _) = vms();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", silent.local_addr().unwrap()).parse().unwrap();
    let params = with(&parameters(), tls(directory.path(), TlsEndpoint::Client));

    let migration = vm::start(&source, &to, &params, Capabilities::default(), Arc::new(()));
    let hello = silent.accept().unwrap();
    migration.cancel().unwrap();
    let outcome = migration.wait();

    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    assert_lives_on(&source.guest);
    drop(hello);
}

/// Records when the source has committed.
#[derive(Default)]
struct Commit(AtomicBool);

impl Observer for Commit {
    fn event(&self, event: &Event) {
        if *event == Event::Committed {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn undecided_source_asks_over_tls() {
    let directory = good_directory();
    let (source, target) = vms();
    let (params, capabilities) = multifd(2);
    let there = with(&params, tls(directory.path(), TlsEndpoint::Server));
    let here = with(&params, tls(directory.path(), TlsEndpoint::Client));
    let incoming = vm::listen(&target, &there, capabilities);
    let commit = Arc::new(Commit::default());
    // After the commit, the next bytes in this direction are the acknowledgement, although TLS hides their content.
    let committed = Arc::clone(&commit);
    let mut lost = false;
    let lose = move |_, way, _, piece: &mut Vec<u8>| {
        if way == Way::Forward || lost || !committed.0.load(Ordering::SeqCst) {
            return Verdict::Pass;
        }
        lost = true;
        piece.clear();
        Verdict::Cut
    };
    let proxy = Proxy::new(&incoming.address(), Box::new(lose));
    let log = Arc::new(Log::default());
    let both = Arc::new(Both(Arc::clone(&commit), Arc::clone(&log)));

    let migration = vm::start(&source, &proxy.address(), &here, capabilities, both);
    let outcome = migration.wait();

    assert_arrived(&outcome, &incoming.wait(), &target.guest);
    assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
}

struct Both(Arc<Commit>, Arc<Log>);

impl Observer for Both {
    fn event(&self, event: &Event) {
        self.0.event(event);
        self.1.event(event);
    }
}

#[test]
fn credentials_for_the_other_end_are_refused_before_anything_starts() {
    let directory = good_directory();
    let (source, target) = pair(&config());
    let server = with(&parameters(), tls(directory.path(), TlsEndpoint::Server));
    let client = with(&parameters(), tls(directory.path(), TlsEndpoint::Client));
    let to = "tcp:127.0.0.1:1".parse().unwrap();

    let leaving = sterna::Migration::start(source, &to, server, Capabilities::default(), Arc::new(()));
    let coming = sterna::Incoming::listen(
        target,
        &"tcp:127.0.0.1:0".parse().unwrap(),
        client,
        Capabilities::default(),
        Arc::new(()),
    );

    let needs = |error: sterna::StartError| match error {
        sterna::StartError::Settings(sterna::SettingsError::WrongCredentials { needed }) => needed,
        error => panic!("{error}"),
    };
    assert_eq!(leaving.err().map(needs), Some(TlsEndpoint::Client));
    assert_eq!(coming.err().map(needs), Some(TlsEndpoint::Server));
}

/// A stream with the sections by which a Sterna identifies its migration, so that the test knows the secret: the part
/// up to *prepare*, and the rest.
fn stream_of(handover: &sterna_wire::extension::Handover) -> (Vec<u8>, Vec<u8>) {
    use sterna_wire::main::{SectionHeader, encode_footer};
    let mut recording = crate::support::recording::Recording::take("sterna-process", 0).with_return_path();
    let (source, _) = vms();
    let record = source.compatibility().expect("a record");
    let (version, body) = handover.encode();
    let sections = [
        (98, sterna_wire::extension::Handover::SECTION_NAME, version, body),
        (99, sterna_wire::extension::COMPATIBILITY_SECTION, record.version(), record.save().unwrap()),
    ];
    let mut bytes = Vec::new();
    for (id, name, version, body) in sections {
        SectionHeader { id, name, instance: 0, version }.encode_full(&mut bytes).unwrap();
        bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&body);
        encode_footer(id, &mut bytes);
    }
    let at = recording.find(&[1, 0, 0, 0, 1, 3, b'r', b'a', b'm']);
    recording.insert(at, &bytes);
    let end = recording.find(b"{\"configuration\"") - 6;
    let (to_eof, rest) = recording.main.split_at(end);
    let prepare = [8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 3];
    ([to_eof, &prepare].concat(), rest.to_vec())
}

#[test]
fn question_is_bound_to_its_own_tls_session() {
    use sterna_transport::{CancelFlag, Channel};
    use sterna_wire::extension::{Handover, MigrationSecret, StatusAnswer, StatusQuestion};
    let secret = MigrationSecret::from_bytes([5; 32]);
    let handover = Handover { migration_id: [6; 16], secret: Some(secret.clone()) };
    let (stream, rest) = stream_of(&handover);
    let directory = good_directory();
    let there = with(&parameters(), tls(directory.path(), TlsEndpoint::Server));
    let here = tls(directory.path(), TlsEndpoint::Client);
    let (_, target) = vms();
    let incoming = vm::listen(&target, &there, Capabilities::default());
    let limit = Duration::from_secs(20);
    let connect = || {
        let to = incoming.address();
        Channel::connect_with(&to, Some(&here), limit, &CancelFlag::new(), Arc::new).expect("TLS")
    };
    let main = connect();
    main.write_all(&stream).expect("written");
    main.read_exact(&mut [0; 8]).expect("the PONG of prepare");
    main.write_all(&rest).expect("written");
    let arrival = incoming.wait();
    assert!(matches!(arrival, sterna::Arrival::Completed(_)), "{arrival:?}");

    let ask = |channel: &Channel, binding: Option<[u8; 32]>| {
        let question = StatusQuestion::new([6; 16], [7; 16], &secret, &binding);
        let mut bytes = Vec::new();
        question.encode(&mut bytes);
        channel.write_all(&bytes).expect("asked");
        let mut answer = [0; StatusAnswer::BYTES];
        channel.read_exact(&mut answer).ok()?;
        let (answer, _) = StatusAnswer::decode(&answer).unwrap().unwrap();
        assert!(answer.is_authentic(&question, &secret, &binding));
        Some(answer.status)
    };
    let (one, other) = (connect(), connect());
    assert_eq!(ask(&one, other.tls_binding()), None, "relayed from another session");
    assert_eq!(ask(&connect(), None), None, "made for a connection without TLS");
    assert_eq!(ask(&other, other.tls_binding()), Some(sterna_wire::extension::Status::Committed));
    drop(main);
}

#[test]
fn lost_acknowledgement_of_a_tls_migration_is_asked_for_over_tls() {
    let (source, target) = vms();
    let (params, capabilities) = multifd(2);
    let directory = good_directory();
    let here = with(&params, tls(directory.path(), TlsEndpoint::Client));
    let there = with(&params, tls(directory.path(), TlsEndpoint::Server));
    let incoming = vm::listen(&target, &there, capabilities);
    let arrived = Arc::new(AtomicBool::new(false));
    // TLS hides the content. The bytes that the destination sends when the guest is started are the acknowledgement.
    let filter = {
        let (arrived, target) = (Arc::clone(&arrived), Arc::clone(&target));
        move |_, way, _, piece: &mut Vec<u8>| {
            let is_started = *target.starts.lock().unwrap() > 0;
            if way == Way::Back && is_started && !arrived.swap(true, Ordering::SeqCst) {
                piece.clear();
                return Verdict::Cut;
            }
            Verdict::Pass
        }
    };
    let proxy = Proxy::new(&incoming.address(), Box::new(filter));
    let log = Arc::new(Log::default());
    let migration = vm::start(&source, &proxy.address(), &here, capabilities, Arc::clone(&log) as _);
    assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
}
