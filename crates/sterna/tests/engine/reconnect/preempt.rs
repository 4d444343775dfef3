//! The channel of requested pages belongs to one session. A channel of an earlier session is rejected, and does not
//! replace the current one.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use super::*;
use crate::common::parameters;
use crate::support::{eventually, has_warning, port, warnings};
use sterna::TargetVm;
use sterna::ram::missing_pages::MissingPages;
use sterna_guests::process::ProcessGuest;
use sterna_wire::extension::{Handover, MigrationSecret, PreemptHello, ReconnectChannel, ReconnectHello};

/// First bytes of the first connection. They include the migration's id and secret.
const BEGINNING: usize = 64 << 10;

type MayPass = Box<dyn Fn(Line, &[u8], &Seen) -> bool + Send>;

#[derive(Default)]
struct Seen {
    beginning: Vec<u8>,
    /// First pieces of connections that are neither main channels nor multifd channels.
    others: Vec<Vec<u8>>,
}

/// A migration with postcopy and preempt. The guest dirties more than the link carries, so precopy does not end by
/// itself.
struct Slow {
    _source: Arc<ProcessGuest>,
    target: Arc<ProcessGuest>,
    proxy: Proxy,
    migration: Migration,
    incoming: Incoming,
    warned: Arc<Log>,
    seen: Arc<std::sync::Mutex<Seen>>,
}

impl Slow {
    /// `None` if this host forbids postcopy.
    fn begin() -> Option<Self> {
        Self::with(Capabilities::default(), Box::new(|_, _, _| true))
    }

    /// Starts with further capabilities. `may_pass` decides whether the first piece of a later session's connection
    /// is forwarded, by the pieces before it.
    fn with(more: Capabilities, may_pass: MayPass) -> Option<Self> {
        if let Err(error) = MissingPages::probe() {
            assert!(std::env::var_os("CI").is_none(), "{error}");
            return None;
        }
        let on = Capabilities { postcopy_ram: true, postcopy_preempt: true, ..more };
        let (params, on) = surviving((parameters(), on));
        let params = Parameters { max_bandwidth_bytes: 512 << 10, ..params };
        let (source, target) = common::pair(&config());
        let warned = Arc::new(Log::default());
        let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming = Incoming::listen(vm, &at, params.clone(), on, warned.clone()).unwrap();
        let seen = Arc::new(std::sync::Mutex::new(Seen::default()));
        let sees = Arc::clone(&seen);
        let filter: Filter = Box::new(move |line, way, offset, piece| {
            let mut seen = sees.lock().unwrap();
            if way == Way::Forward && offset == 0 && !may_pass(line, piece, &seen) {
                return Verdict::Later;
            }
            if line == Line::Main && way == Way::Forward && seen.beginning.len() < BEGINNING {
                seen.beginning.extend_from_slice(piece);
            }
            if line == Line::Other && way == Way::Forward && offset == 0 {
                seen.others.push(piece.clone());
            }
            Verdict::Pass
        });
        let proxy = Proxy::new(&incoming.address(), filter);
        let migration = common::start(&source, &proxy.address(), &params, on, Arc::new(()));
        let slow = Self { _source: source, target, proxy, migration, incoming, warned, seen };
        // The handover's section is sent before them.
        eventually("pages", || slow.migration.statistics().normal_pages > 16);
        Some(slow)
    }

    fn has_told(&self, is_it: impl Fn(&Event) -> bool) -> bool {
        self.warned.events().iter().any(is_it)
    }

    fn comes_back(&self) {
        eventually("the new session", || self.has_told(|event| matches!(event, Event::Reconnected { .. })));
        eventually("the new session here", || self.migration.statistics().reconnections.len() == 1);
    }

    fn identity(&self) -> ([u8; 16], MigrationSecret) {
        let seen = self.seen.lock().unwrap();
        let name = Handover::SECTION_NAME.as_bytes();
        let at = seen.beginning.windows(name.len()).position(|window| window == name).expect("the section");
        // Instance, version and the body's length precede it.
        let body = &seen.beginning[at + name.len() + 12..];
        let handover = Handover::decode(Handover::SECTION_VERSION, &body[..Handover::BODY_BYTES]).unwrap();
        (handover.migration_id, handover.secret.expect("a secret"))
    }

    /// Hello of a preempt channel in the first session.
    fn old_hello(&self) -> Vec<u8> {
        let (id, secret) = self.identity();
        let mut bytes = Vec::new();
        PreemptHello::new(id, &secret, &None).encode(&mut bytes);
        bytes
    }

    /// Hello of a preempt channel in session `session`, which is not the first.
    fn hello_of(&self, session: u32) -> Vec<u8> {
        let (id, secret) = self.identity();
        let mut bytes = Vec::new();
        ReconnectHello::new(id, (session, ReconnectChannel::Preempt), [1; 16], &secret, &None)
            .encode(&mut bytes);
        bytes
    }

    /// Connects directly, without the proxy.
    fn dial(&self, hello: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", port(&self.incoming.address()))).unwrap();
        stream.write_all(hello).unwrap();
        stream
    }

    /// Asserts that the connection gets no byte, and is closed with this reason.
    fn refuses(&self, hello: &[u8], why: &str) {
        let before = warnings(&self.warned.events()).len();
        let mut got = Vec::new();
        let mut stream = self.dial(hello);
        // An accepted connection stays open.
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let _ = stream.read_to_end(&mut got);
        assert_eq!(got, b"", "{why}");
        eventually(why, || warnings(&self.warned.events())[before..].iter().any(|text| text.contains(why)));
    }

    /// Switches to postcopy. Asserts that the guest arrives complete, over a preempt channel of the current session.
    fn arrives_in_postcopy(&self) {
        self.migration.start_postcopy().unwrap();
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target);
        assert_eq!(self.migration.statistics().reconnections.len(), 1);
        let seen = self.seen.lock().unwrap();
        let channels: Vec<_> = seen.others.iter().map(|piece| ReconnectHello::decode(piece)).collect();
        let is_its = |hello: &ReconnectHello| hello.channel == ReconnectChannel::Preempt && hello.session > 0;
        assert!(matches!(&channels[..], [Ok(Some((hello, _)))] if is_its(hello)), "{channels:?}");
    }
}

#[test]
fn preempt_channel_of_an_old_session_is_refused_and_the_present_ones_is_taken() {
    let Some(slow) = Slow::begin() else { return };
    slow.proxy.cut();
    slow.comes_back();
    slow.refuses(&slow.old_hello(), "an old preempt channel came");
    for session in [0, 99] {
        slow.refuses(&slow.hello_of(session), "brings a preempt channel that no session waits for");
    }
    slow.arrives_in_postcopy();
}

#[test]
fn preempt_channel_that_comes_while_the_source_is_away_takes_no_place() {
    let Some(slow) = Slow::begin() else { return };
    slow.proxy.refuse(true);
    slow.proxy.cut();
    eventually("the loss", || slow.has_told(|event| matches!(event, Event::ConnectionLost { .. })));
    let hello = slow.old_hello();
    // A connection that arrives before the destination has ended the lost session may be kept until the next session
    // begins.
    let mut kept = Vec::new();
    eventually("a refusal", || {
        let mut stream = slow.dial(&hello);
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let is_open = matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        kept.push(stream);
        !is_open
    });
    slow.proxy.refuse(false);
    slow.comes_back();
    slow.arrives_in_postcopy();
}

/// Connections are greeted in parallel, so the order in which hellos are read depends on timing.
#[test]
fn preempt_channel_that_overtakes_the_last_lane_of_its_session_is_taken() {
    let of_a_later_session = |piece: &[u8]| matches!(ReconnectHello::decode(piece), Ok(Some(_)));
    let may_pass: MayPass = Box::new(move |line, piece, seen| {
        line != Line::Lane(1) || !of_a_later_session(piece) || !seen.others.is_empty()
    });
    let lanes = Capabilities { multifd: true, ..Capabilities::default() };
    let Some(slow) = Slow::with(lanes, may_pass) else { return };
    slow.proxy.refuse(true);
    slow.proxy.cut();
    eventually("the loss", || slow.migration.statistics().disconnected.is_some());
    slow.migration.start_postcopy().unwrap();
    slow.proxy.refuse(false);

    let (outcome, arrival) = (slow.migration.wait(), slow.incoming.wait());
    common::assert_arrived(&outcome, &arrival, &slow.target);
    assert!(!has_warning(&slow.warned.events(), &["preempt channel"]));
}
