//! Whole relays over loopback, with carriers that a proxy cuts at random bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_relay::frame::{RouteName, SharedSecret};
use sterna_relay::phase::Phase;
use sterna_relay::relay::{Acceptor, Compress, Dialer, Limit, Notice, Notices, Options, Routes, Security};
use sterna_relay::session::Settings;
use sterna_transport::Address;
use sterna_wire::return_path::ReturnMessage;
use tempfile::TempDir;

use crate::phases::Stream;

const PATIENCE: Duration = Duration::from_secs(60);

/// A proxy for carriers, which cuts its connections when the test asks.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    pub(crate) connections: Arc<Mutex<Vec<TcpStream>>>,
    pub(crate) is_blocked: Arc<AtomicBool>,
    /// Bytes are read and not passed on.
    pub(crate) swallows: Arc<AtomicBool>,
    /// After so many bytes of all connections, all of them are cut. 0: never.
    pub(crate) cut_after: Arc<AtomicU64>,
    pub(crate) cuts: Arc<AtomicU64>,
    /// Bytes of all connections, in both directions.
    pub(crate) carried: Arc<AtomicU64>,
}

impl Proxy {
    fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            connections: Arc::default(),
            is_blocked: Arc::default(),
            swallows: Arc::default(),
            cut_after: Arc::default(),
            cuts: Arc::default(),
            carried: Arc::default(),
        };
        let Self { connections, is_blocked, swallows, cut_after, cuts, carried, .. } = &proxy;
        let swallows = Arc::clone(swallows);
        let (connections, is_blocked) = (Arc::clone(connections), Arc::clone(is_blocked));
        let (cut_after, cuts, carried) = (Arc::clone(cut_after), Arc::clone(cuts), Arc::clone(carried));
        std::thread::spawn(move || {
            for one in listener.incoming().map_while(Result::ok) {
                if is_blocked.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(other) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                let mut all = connections.lock().unwrap();
                all.extend([one.try_clone().unwrap(), other.try_clone().unwrap()]);
                drop(all);
                for (from, to) in [(one.try_clone().unwrap(), other.try_clone().unwrap()), (other, one)] {
                    let (connections, swallows) = (Arc::clone(&connections), Arc::clone(&swallows));
                    let (cut_after, cuts, carried) =
                        (Arc::clone(&cut_after), Arc::clone(&cuts), Arc::clone(&carried));
                    std::thread::spawn(move || {
                        pump(from, to, &connections, &swallows, &cut_after, &cuts, &carried)
                    });
                }
            }
        });
        proxy
    }

    pub(crate) fn cut(&self) {
        cut(&self.connections);
    }

    pub fn block(&self, is_blocked: bool) {
        self.is_blocked.store(is_blocked, Ordering::SeqCst);
        if is_blocked {
            self.cut();
        }
    }
}

fn cut(connections: &Mutex<Vec<TcpStream>>) {
    for connection in connections.lock().unwrap().drain(..) {
        let _ = connection.shutdown(Shutdown::Both);
    }
}

fn pump(
    mut from: TcpStream,
    mut to: TcpStream,
    connections: &Mutex<Vec<TcpStream>>,
    swallows: &AtomicBool,
    cut_after: &AtomicU64,
    cuts: &AtomicU64,
    carried: &AtomicU64,
) {
    let mut buffer = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if swallows.load(Ordering::SeqCst) {
            continue;
        }
        carried.fetch_add(count as u64, Ordering::SeqCst);
        let left = cut_after.load(Ordering::SeqCst);
        let passes = if left == 0 { count } else { count.min(left as usize) };
        if to.write_all(&buffer[..passes]).is_err() {
            break;
        }
        if left > 0 {
            let rest = left - passes as u64;
            cut_after.store(rest, Ordering::SeqCst);
            if rest == 0 {
                cuts.fetch_add(1, Ordering::SeqCst);
                cut(connections);
                break;
            }
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Two relays with a proxy between them: a socket for the source's VMM and one where the destination's listens.
pub(crate) struct Pair {
    pub(crate) directory: TempDir,
    pub(crate) proxy: Proxy,
    pub(crate) dialer: Dialer,
    pub(crate) acceptor: Acceptor,
    pub(crate) notices: Arc<Mutex<Vec<Notice>>>,
    pub(crate) target: UnixListener,
}

pub(crate) fn options(notices: &Arc<Mutex<Vec<Notice>>>) -> Options {
    let notices = Arc::clone(notices);
    Options {
        security: Security::default(),
        carriers: 2,
        reconnect_window: Duration::from_secs(60),
        buffer_bytes: Settings::LEAST_BUFFER,
        unconfirmed: false,
        is_raw: true,
        compress: Compress::off(),
        limit: Limit::default(),
        notices: Notices::new(move |notice| notices.lock().unwrap().push(notice)),
    }
}

pub(crate) fn secret(byte: u8) -> Option<SharedSecret> {
    SharedSecret::from_file(&[byte; 32])
}

pub(crate) fn route() -> RouteName {
    "web1".parse().unwrap()
}

impl Pair {
    pub(crate) fn start(change: impl Fn(&mut Options, bool)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let notices = Arc::default();
        let target_path = directory.path().join("target");
        let target = UnixListener::bind(&target_path).unwrap();
        let routes = Routes { table: [(route(), Address::Unix(target_path))].into(), directory: None };
        let (mut ours, mut theirs) = (options(&notices), options(&notices));
        change(&mut ours, true);
        change(&mut theirs, false);
        let acceptor = Acceptor::start(&"tcp:127.0.0.1:0".parse().unwrap(), routes, theirs).unwrap();
        let Address::Tcp { port, .. } = *acceptor.address() else { unreachable!() };
        let proxy = Proxy::start(port);
        let to = format!("tcp:127.0.0.1:{}", proxy.port).parse().unwrap();
        let listen = Address::Unix(directory.path().join("source"));
        let dialer = Dialer::start(&listen, to, route(), ours).unwrap();
        Self { directory, proxy, dialer, acceptor, notices, target }
    }

    pub(crate) fn source(&self) -> PathBuf {
        self.directory.path().join("source")
    }

    /// Connects a VMM at the source; returns it and the connection that arrives at the destination.
    pub(crate) fn flow(&self) -> (UnixStream, UnixStream) {
        let source = UnixStream::connect(self.source()).unwrap();
        let (target, _) = self.target.accept().unwrap();
        for end in [&source, &target] {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
            end.set_write_timeout(Some(PATIENCE)).unwrap();
        }
        (source, target)
    }

    /// As [`flow`](Self::flow), with the first bytes of the source's VMM, if the destination waits for them.
    pub(crate) fn flow_with(&self, first: &[u8]) -> (UnixStream, UnixStream) {
        let (mut source, target) = self.flow();
        source.write_all(first).unwrap();
        (source, target)
    }

    /// Waits until both relays have said it.
    pub(crate) fn wait_for_both(&self, what: &str, wanted: impl Fn(&Notice) -> bool) {
        until(what, || self.notices.lock().unwrap().iter().filter(|notice| wanted(notice)).count() >= 2);
    }

    pub(crate) fn wait_for(&self, what: &str, wanted: impl Fn(&Notice) -> bool) {
        until(what, || self.notices.lock().unwrap().iter().any(&wanted));
    }

    pub(crate) fn said(&self) -> String {
        self.notices.lock().unwrap().iter().map(|notice| format!("{notice}\n")).collect()
    }
}

pub(crate) fn until(what: &str, is_done: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_done() {
        assert!(began.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
}

pub(crate) fn send(mut to: UnixStream, bytes: Vec<u8>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        to.write_all(&bytes).unwrap();
        to.shutdown(Shutdown::Write).unwrap();
    })
}

pub(crate) fn read_all(mut from: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn relays_carry_bytes_in_both_directions_and_half_closes() {
    let pair = Pair::start(|_, _| {});
    let (source, target) = pair.flow();
    let (out, back) = (pattern(1, 3_000_000), pattern(2, 100_000));
    let sender = send(source.try_clone().unwrap(), out.clone());
    assert!(read_all(&target) == out, "{}", pair.said());
    // The other direction still works after the first has ended.
    let answer = send(target.try_clone().unwrap(), back.clone());
    assert!(read_all(&source) == back);
    sender.join().unwrap();
    answer.join().unwrap();
    until("the end of the sessions", || !pair.dialer.is_busy() && pair.acceptor.open_sessions() == 0);
    pair.wait_for("an end in order", |notice| matches!(notice, Notice::Ended { in_order: true, .. }));
}

#[test]
fn relays_carry_every_byte_whatever_is_cut() {
    let mut random = sterna_testing::random("relays_carry_every_byte_whatever_is_cut");
    for _ in 0..sterna_testing::rounds(6) {
        let pair = Pair::start(|options, _| options.security.secret = secret(7));
        let flows: Vec<_> = (0..3).map(|_| pair.flow()).collect();
        let sizes: Vec<usize> = flows.iter().map(|_| random.usize(0..3_000_000)).collect();
        let mut threads = Vec::new();
        for (at, (source, target)) in flows.iter().enumerate() {
            threads.push(send(source.try_clone().unwrap(), pattern(at as u8, sizes[at])));
            threads.push(send(target.try_clone().unwrap(), pattern(at as u8 ^ 0xff, sizes[at] / 10)));
        }
        let readers: Vec<_> = flows
            .iter()
            .map(|(source, target)| {
                let (source, target) = (source.try_clone().unwrap(), target.try_clone().unwrap());
                (std::thread::spawn(move || read_all(&target)), std::thread::spawn(move || read_all(&source)))
            })
            .collect();
        for _ in 0..random.u32(1..6) {
            let before = pair.proxy.cuts.load(Ordering::SeqCst);
            pair.proxy.cut_after.store(random.u64(1..1_500_000), Ordering::SeqCst);
            let began = Instant::now();
            // All bytes may have passed already.
            while pair.proxy.cuts.load(Ordering::SeqCst) == before && began.elapsed() < Duration::from_secs(2)
            {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        pair.proxy.cut_after.store(0, Ordering::SeqCst);
        for (at, (target, source)) in readers.into_iter().enumerate() {
            assert!(target.join().unwrap() == pattern(at as u8, sizes[at]), "flow {at}: {}", pair.said());
            assert!(source.join().unwrap() == pattern(at as u8 ^ 0xff, sizes[at] / 10), "flow {at}, back");
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn relays_deliver_a_broken_connection_after_its_bytes() {
    let pair = Pair::start(|_, _| {});
    let (mut source, mut target) = pair.flow();
    source.write_all(b"last words").unwrap();
    let mut words = [0; 10];
    target.read_exact(&mut words).unwrap();
    // Closing with unread bytes resets a Unix socket.
    target.write_all(&[1; 1000]).unwrap();
    until("bytes back", || rustix_pending(&source));
    drop(source);
    assert_eq!(read_all(&target), b"");
    until("the end of the flow", || (&target).write_all(&[0; 1000]).is_err());
}

fn rustix_pending(stream: &UnixStream) -> bool {
    rustix::io::ioctl_fionread(stream).is_ok_and(|count| count > 0)
}

#[test]
fn relays_with_a_peer_that_never_reads_carry_the_other_flows() {
    let pair = Pair::start(|_, _| {});
    let (deaf, _deaf_target) = pair.flow();
    deaf.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut deaf = deaf;
    let mut stuck = 0_u64;
    let chunk = vec![9; 65_536];
    let error = loop {
        match deaf.write(&chunk) {
            Ok(count) => stuck += count as u64,
            Err(error) => break error,
        }
        assert!(stuck < 2 * Settings::LEAST_BUFFER, "memory is bounded");
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    let (source, target) = pair.flow();
    let bytes = pattern(3, 8_000_000);
    let sender = send(source, bytes.clone());
    assert!(read_all(&target) == bytes);
    sender.join().unwrap();
}

#[test]
fn relays_with_different_secrets_do_not_meet() {
    let pair = Pair::start(|options, is_source| {
        options.security.secret = secret(if is_source { 1 } else { 2 });
        // So long a refusal is taken for a network that is away.
        options.reconnect_window = Duration::from_secs(1);
    });
    let mut source = UnixStream::connect(pair.source()).unwrap();
    assert_eq!(source.read(&mut [0; 1]).unwrap(), 0, "closed");
    pair.wait_for(
        "a refusal",
        |notice| matches!(notice, Notice::Refused { why, .. } if why.contains("secret")),
    );
    pair.target.set_nonblocking(true).unwrap();
    assert!(pair.target.accept().is_err(), "the destination's VMM sees nothing");
}

#[test]
fn network_that_is_away_when_a_session_begins_only_delays_it() {
    let pair = Pair::start(|options, _| options.security.secret = secret(7));
    // Connections are accepted and closed, as by a proxy whose other end is away.
    pair.proxy.block(true);
    let source = UnixStream::connect(pair.source()).unwrap();
    let bytes = pattern(5, 100_000);
    let sender = send(source, bytes.clone());
    std::thread::sleep(Duration::from_millis(500));

    pair.proxy.block(false);

    pair.target.set_nonblocking(true).unwrap();
    let arrived = Mutex::new(None);
    until("a connection", || {
        let accepted = pair.target.accept().ok();
        accepted.map(|(target, _)| *arrived.lock().unwrap() = Some(target)).is_some()
    });
    let target = arrived.into_inner().unwrap().unwrap();
    target.set_nonblocking(false).unwrap();
    assert!(read_all(&target) == bytes, "{}", pair.said());
    sender.join().unwrap();
}

#[test]
fn relay_refuses_a_route_that_it_does_not_have() {
    let notices: Arc<Mutex<Vec<Notice>>> = Arc::default();
    let directory = tempfile::tempdir().unwrap();
    let routes = Routes { directory: Some(directory.path().to_owned()), ..Routes::default() };
    let listen = "tcp:127.0.0.1:0".parse().unwrap();
    let acceptor = Acceptor::start(&listen, routes, options(&notices)).unwrap();
    let at = Address::Unix(directory.path().join("door"));
    let _dialer = Dialer::start(&at, acceptor.address().clone(), route(), options(&notices)).unwrap();
    let mut source = UnixStream::connect(directory.path().join("door")).unwrap();
    assert_eq!(source.read(&mut [0; 1]).unwrap(), 0, "closed");
    let said = || -> String { notices.lock().unwrap().iter().map(ToString::to_string).collect() };
    until("the reason", || said().contains("no such route"));
}

#[test]
fn relay_that_strangers_connect_to_serves_its_sessions() {
    let pair = Pair::start(|options, _| options.security.secret = secret(7));
    let Address::Tcp { port, .. } = *pair.acceptor.address() else { unreachable!() };
    let (source, target) = pair.flow();
    let mut strangers: Vec<TcpStream> =
        (0..600).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    for (at, stranger) in strangers.iter_mut().enumerate() {
        // Some are silent, some speak another protocol. The relay may have closed the oldest.
        let _ = if at % 2 == 0 { stranger.write_all(&[0xff; 200]) } else { Ok(()) };
    }
    pair.proxy.cut();
    let bytes = pattern(5, 2_000_000);
    let sender = send(source, bytes.clone());
    assert!(read_all(&target) == bytes, "{}", pair.said());
    sender.join().unwrap();
    let mut answer = [0; 1];
    strangers[0].set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(!matches!(strangers[0].read(&mut answer), Ok(1..)), "a stranger gets no byte");
}

#[test]
fn relay_without_proof_listens_only_where_no_other_host_reaches_it() {
    let notices = Arc::default();
    for bad in ["tcp:0.0.0.0:0", "tcp::0", "tcp:192.0.2.1:0"] {
        let error =
            Acceptor::start(&bad.parse().unwrap(), Routes::default(), options(&notices)).err().unwrap();
        assert!(error.to_string().contains("--insecure"), "{error}");
    }
}

/// A QEMU's source: it writes a stream and waits for SHUT.
pub(crate) fn precopy(has_return_path: bool) -> Stream {
    let mut stream = Stream::begin(has_return_path).unwrap();
    stream.ram(0..8, false).unwrap();
    stream
}

#[test]
fn migration_whose_window_ends_before_the_end_is_closed_at_the_source() {
    let pair = Pair::start(|options, _| {
        options.is_raw = false;
        options.reconnect_window = Duration::from_millis(400);
    });
    let (mut source, mut target) = pair.flow();
    let stream = precopy(true);
    source.write_all(&stream.bytes).unwrap();
    target.read_exact(&mut vec![0; stream.bytes.len()]).unwrap();
    pair.proxy.block(true);
    assert_eq!(source.read(&mut [0; 1]).unwrap(), 0, "the source fails, and its guest runs");
    assert_eq!(target.read(&mut [0; 1]).unwrap(), 0, "the destination fails");
    assert!(pair.said().contains("The guest runs at the source"), "{}", pair.said());
}

#[test]
fn migration_whose_end_was_passed_on_keeps_its_source_waiting_and_gets_shut() {
    let pair = Pair::start(|options, _| {
        options.is_raw = false;
        options.reconnect_window = Duration::from_millis(300);
    });
    let (mut source, mut target) = pair.flow();
    let mut stream = precopy(true);
    stream.ram(0..1, true).unwrap();
    stream.end().unwrap();
    source.write_all(&stream.bytes).unwrap();
    target.read_exact(&mut vec![0; stream.bytes.len()]).unwrap();
    pair.proxy.block(true);
    pair.wait_for("the advice", |notice| matches!(notice, Notice::Waiting { .. }));
    source.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let waiting = source.read(&mut [0; 1]).unwrap_err();
    assert_eq!(waiting.kind(), ErrorKind::WouldBlock, "the source waits: {}", pair.said());
    // The guest runs at the destination, which sends SHUT. That arrives when the network is back.
    let mut shut = Vec::new();
    ReturnMessage::Shut(0).encode(&mut shut).unwrap();
    target.write_all(&shut).unwrap();
    target.shutdown(Shutdown::Write).unwrap();
    pair.proxy.block(false);
    source.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(read_all(&source), shut, "{}", pair.said());
}

#[test]
fn migration_whose_end_did_not_arrive_is_closed_at_the_source_when_the_relays_meet() {
    let pair = Pair::start(|options, _| {
        options.is_raw = false;
        options.reconnect_window = Duration::from_millis(400);
    });
    let (mut source, mut target) = pair.flow();
    let mut stream = precopy(true);
    source.write_all(&stream.bytes).unwrap();
    let begun = stream.bytes.len();
    target.read_exact(&mut vec![0; begun]).unwrap();
    pair.proxy.swallows.store(true, Ordering::SeqCst);
    stream.ram(0..1, true).unwrap();
    stream.end().unwrap();
    source.write_all(&stream.bytes[begun..]).unwrap();
    let ended = |notice: &Notice| matches!(notice, Notice::Phase { phase: Phase::Ended, .. });
    pair.wait_for("the end at the source's relay", ended);
    // The bytes are given to a carrier at once, and disappear.
    std::thread::sleep(Duration::from_millis(100));
    pair.proxy.block(true);
    pair.wait_for("the wait", |notice| matches!(notice, Notice::Waiting { .. }));
    pair.wait_for("the destination's promise", |notice| matches!(notice, Notice::Ended { .. }));
    assert_eq!(read_all(&target), b"", "the destination fails");
    pair.proxy.swallows.store(false, Ordering::SeqCst);
    pair.proxy.block(false);
    assert_eq!(read_all(&source), b"", "the source resumes");
    until("the reason", || pair.said().contains("The guest runs at the source"));
}

#[test]
fn migration_without_return_path_and_a_second_one_are_refused() {
    let pair = Pair::start(|options, _| options.is_raw = false);
    let (mut source, target) = pair.flow();
    source.write_all(&precopy(false).bytes).unwrap();
    assert_eq!(source.read(&mut [0; 1]).unwrap(), 0, "refused");
    assert_eq!(read_all(&target), b"", "no byte of it has passed");
    pair.wait_for(
        "a refusal",
        |notice| matches!(notice, Notice::Refused { why, .. } if why.contains("return-path")),
    );

    let pair = Pair::start(|options, _| options.is_raw = false);
    let (mut first, mut target) = pair.flow();
    let stream = precopy(true);
    first.write_all(&stream.bytes).unwrap();
    target.read_exact(&mut vec![0; stream.bytes.len()]).unwrap();
    let mut second = UnixStream::connect(pair.source()).unwrap();
    let _ = second.write_all(&stream.bytes);
    assert!(!matches!(second.read(&mut [0; 1]), Ok(1..)), "refused");
    pair.target.set_nonblocking(true).unwrap();
    assert!(pair.target.accept().is_err(), "the destination's VMM sees nothing of it");
    pair.wait_for(
        "a refusal",
        |notice| matches!(notice, Notice::Refused { why, .. } if why.contains("second main")),
    );
    first.write_all(&[]).unwrap();
}
