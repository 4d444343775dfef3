//! A source that has sent the order to start in postcopy, has lost the report of the start, and cannot ask.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use sterna::{
    Address, Capabilities, Decision, Event, Incoming, Migration, Observer, Outcome, Parameters, Status,
    StatusQuestions, Vm, Waited,
};
use sterna_guests::process::ProcessGuest;
use sterna_proto::source::{Refusal, State};

use super::recovery::{guest, trickle};
use super::{capabilities, eventually, until_status};
use crate::common;
use crate::support::port;
use crate::support::proxy::{Line, Proxy, Verdict, Way, at_pattern};

/// PONG with the value that reports the start of the guest.
const STARTED: &[u8] = &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x20];

fn unasked() -> Parameters {
    Parameters { status_questions: StatusQuestions::Operator, ..trickle() }
}

/// A guest that runs at its destination and lacks most pages. Its source is undecided.
struct Undecided {
    source: Arc<ProcessGuest>,
    target: Arc<ProcessGuest>,
    incoming: Incoming,
    migration: Migration,
    proxy: Proxy,
}

impl Undecided {
    /// `to` makes the source's address out of the proxy's.
    fn begin(
        params: &Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        to: impl Fn(Address) -> Address,
    ) -> Self {
        let (source, target) = common::pair(&guest());
        let incoming = common::listen(&target, params, capabilities);
        let cuts = at_pattern(Line::Main, Way::Back, STARTED, false, Verdict::Cut);
        let proxy = Proxy::new(&incoming.address(), cuts);
        let migration = common::start(&source, &to(proxy.address()), params, capabilities, observer);
        migration.start_postcopy().unwrap();
        until_status(&migration, Status::Undecided);
        eventually("the loss", || incoming.status() == Status::PostcopyPaused);
        assert!(incoming.statistics().postcopy.is_some_and(|postcopy| postcopy.missing_pages > 0));
        Self { source, target, incoming, migration, proxy }
    }

    fn resume(&self) {
        self.migration.resume(&self.proxy.address()).unwrap();
    }

    /// Waits for both ends, and checks every page where the guest arrived.
    fn arrives(&self) {
        self.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target);
        assert_eq!(self.incoming.statistics().postcopy.unwrap().missing_pages, 0);
        assert!(!self.source.ram().custody().may_run());
    }
}

#[test]
fn guest_gets_every_page_after_the_decision_and_a_recovery() {
    for preempt in [false, true] {
        let Some(on) = capabilities(preempt) else { return };
        let undecided = Undecided::begin(&unasked(), on, Arc::new(()), |proxy| proxy);
        let migration = &undecided.migration;
        let early = migration.resume(&undecided.proxy.address());
        assert!(early.is_err(), "the operator has not decided");

        let other = migration.decide_seen(Decision::DestinationRuns, Status::PostcopyPaused);
        assert_eq!(other, Err(Refusal::NotUndecided { state: State::Undecided }));
        migration.decide_seen(Decision::DestinationRuns, Status::Undecided).unwrap();

        until_status(migration, Status::PostcopyPaused);
        let state = State::PostcopyPaused;
        for decision in [Decision::SourceRuns, Decision::DestinationRuns] {
            let late = migration.decide_seen(decision, Status::Undecided);
            assert_eq!(late, Err(Refusal::NotUndecided { state }), "it would give up pages");
        }
        let waited = migration.wait_timeout(Duration::from_millis(30));
        assert!(matches!(waited, Waited::TimedOut), "{waited:?}");
        assert!(matches!(migration.cancel(), Err(Refusal::CancelPaused { .. })));
        assert!(matches!(migration.decide(Decision::SourceRuns), Err(Refusal::RanElsewhere)));
        undecided.resume();
        undecided.arrives();
        assert!(migration.decide(Decision::DestinationRuns).is_err(), "it has ended");
    }
}

/// A connected socket is one connection: the source can neither ask nor connect again without another address.
#[test]
fn guest_that_left_over_a_connected_socket_gets_every_page() {
    let Some(on) = capabilities(false) else { return };
    let connect = |proxy: Address| {
        let socket = TcpStream::connect(("127.0.0.1", port(&proxy))).unwrap();
        Address::from_connected(socket.into()).unwrap()
    };
    let undecided = Undecided::begin(&trickle(), on, Arc::new(()), connect);

    undecided.migration.decide(Decision::DestinationRuns).unwrap();

    until_status(&undecided.migration, Status::PostcopyPaused);
    undecided.resume();
    undecided.arrives();
}

#[test]
fn source_with_a_window_connects_by_itself_after_the_decision() {
    let Some(on) = capabilities(true) else { return };
    let params = Parameters { reconnect_window: Duration::from_secs(60), ..unasked() };
    let undecided = Undecided::begin(&params, on, Arc::new(()), |proxy| proxy);

    undecided.migration.decide(Decision::DestinationRuns).unwrap();

    undecided.arrives();
}

#[test]
fn second_decision_gives_up_the_pages() {
    let Some(on) = capabilities(false) else { return };
    let undecided = Undecided::begin(&unasked(), on, Arc::new(()), |proxy| proxy);
    undecided.migration.decide(Decision::DestinationRuns).unwrap();
    until_status(&undecided.migration, Status::PostcopyPaused);

    undecided.migration.decide(Decision::DestinationRuns).unwrap();

    assert!(matches!(undecided.migration.wait(), Outcome::Completed));
    assert_eq!(undecided.incoming.status(), Status::PostcopyPaused, "its guest lacks pages");
}

/// Blocks the control thread in the warning about the undecided migration.
struct Blocks {
    is_done: AtomicBool,
    until: Mutex<mpsc::Receiver<()>>,
}

impl Observer for Blocks {
    fn event(&self, event: &Event) {
        let is_due = matches!(event, Event::Warning(text) if text.starts_with("undecided"));
        if is_due && !self.is_done.swap(true, Ordering::SeqCst) {
            let _ = self.until.lock().unwrap().recv();
        }
    }
}

/// Both decisions are about the status that the operators saw. The second one must not give up the pages.
#[test]
fn two_decisions_about_the_same_undecided_migration_are_one() {
    let Some(on) = capabilities(false) else { return };
    let (go, until) = mpsc::channel();
    let blocks = Arc::new(Blocks { is_done: AtomicBool::new(false), until: Mutex::new(until) });
    let undecided = Undecided::begin(&unasked(), on, blocks, |proxy| proxy);
    let migration = &undecided.migration;

    migration.decide(Decision::DestinationRuns).unwrap();
    assert_eq!(migration.status(), Status::Undecided, "not published yet");
    let second = migration.decide(Decision::DestinationRuns);

    let state = State::PostcopyPaused;
    assert_eq!(second, Err(Refusal::NotUndecided { state }));
    go.send(()).unwrap();
    until_status(migration, Status::PostcopyPaused);
    undecided.resume();
    undecided.arrives();
}
