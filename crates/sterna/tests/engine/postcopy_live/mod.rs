//! Postcopy between running guests: the guest resumes at its destination before its pages are there.

mod destination;
mod forecast;
mod lanes;
mod lanes_peer;
mod liars;
mod pausing;
mod peer;
mod recovery;
mod report;
mod shortage;
mod source;
mod streams;
mod undecided;
mod waiting;
mod whole;

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::missing_pages::MissingPages;
use sterna::ram::{Backing, PAGE_SIZE};
use sterna::{
    Arrival, Capabilities, Event, Incoming, Migration, NonConvergence, Outcome, Parameters, RunState,
    SettingsError, StartError, Status, TargetVm, Tls, TlsCredentials, TlsEndpoint, Vm,
};
use sterna_guests::model::{Acts, Fill};
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_proto::source::Refusal;

use crate::common::{self, Log};
use crate::support::{eventually, has_warning, until_status};

/// Four workers that write pages, or zero them, over pages of every kind.
fn config() -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 24 << 20), ("ram.high".into(), 8 << 20)],
        fill: Fill::Half(7),
        acts: Acts::MIXED,
        workers: 4,
        seed: 17,
        ..common::config()
    }
}

/// Capabilities for postcopy. `None` if this host forbids postcopy.
fn capabilities(preempt: bool) -> Option<Capabilities> {
    if let Err(error) = MissingPages::probe() {
        assert!(std::env::var_os("CI").is_none(), "{error}");
        tracing::warn!("skipped: {error}");
        return None;
    }
    Some(Capabilities { postcopy_ram: true, postcopy_preempt: preempt, ..Capabilities::default() })
}

/// Slow enough that precopy does not end by itself.
fn slow() -> Parameters {
    Parameters { max_bandwidth_bytes: 20 << 20, ..common::parameters() }
}

/// A guest in migration, and its destination.
struct Pair {
    /// Kept alive until the test ends.
    _source: Arc<ProcessGuest>,
    target: Arc<ProcessGuest>,
    incoming: Incoming,
    migration: Migration,
    /// Events of the two sides.
    logs: [Arc<Log>; 2],
}

impl Pair {
    fn begin(config: &ProcessConfig, params: &Parameters, capabilities: Capabilities) -> Self {
        let (source, target) = common::pair(config);
        let logs = [Arc::new(Log::default()), Arc::new(Log::default())];
        let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, logs[1].clone()).unwrap();
        let to = incoming.address();
        let migration = common::start(&source, &to, params, capabilities, logs[0].clone());
        Self { _source: source, target, incoming, migration, logs }
    }

    /// Switches to postcopy after that many rounds.
    fn after_rounds(self, rounds: u64) -> Self {
        eventually("rounds", || self.migration.statistics().rounds_begun >= rounds);
        self
    }

    fn switch(self) -> Self {
        self.migration.start_postcopy().unwrap();
        self
    }

    /// Waits for both ends, and checks the guest where it arrived.
    fn arrives(self) -> Self {
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target);
        assert!(!self.migration.may_guest_run(), "it has left for good");
        self
    }

    /// The statuses that this side reported, from `from` on, in order.
    fn told(&self, side: usize, from: Status) -> Vec<Status> {
        let status = |event: &Event| if let Event::Status(status) = event { Some(*status) } else { None };
        let all: Vec<_> = self.logs[side].events().iter().filter_map(status).collect();
        all.into_iter().skip_while(|status| *status != from).collect()
    }
}

#[test]
fn guest_goes_on_at_once_and_all_of_its_pages_follow() {
    for preempt in [false, true] {
        let Some(capabilities) = capabilities(preempt) else { return };
        let pair = Pair::begin(&config(), &slow(), capabilities).switch().arrives();

        let (ours, theirs) = (pair.migration.statistics(), pair.incoming.statistics());
        let postcopy = theirs.postcopy.expect("it ran early");
        assert_eq!(postcopy.missing_pages, 0);
        assert_eq!(postcopy.requests, ours.postcopy_requests, "each request came");
        assert!(postcopy.requests > 0, "four writers have waited for no page");
        assert!(ours.postcopy_bytes > 0 && ours.ram_remaining_bytes == 0, "{ours:?}");
        assert!(ours.downtime.unwrap() < ours.total_time, "{ours:?}");
        let following = [Status::PostcopyDevice, Status::PostcopyActive, Status::Completed];
        assert_eq!(pair.told(0, Status::PostcopyDevice), following);
        assert_eq!(pair.told(1, Status::PostcopyActive), following[1..]);
    }
}

#[test]
fn guest_that_arrived_in_postcopy_leaves_again_in_both_ways() {
    let Some(capabilities) = capabilities(true) else { return };
    let first = Pair::begin(&config(), &slow(), capabilities).switch().arrives();
    let second = ProcessGuest::waiting(config()).unwrap();
    let (_, outcome, arrival) =
        common::migrate(&first.target, &second, &common::parameters(), Capabilities::default());
    common::assert_arrived(&outcome, &arrival, &second);
    let third = ProcessGuest::waiting(config()).unwrap();
    let incoming = common::listen(&third, &slow(), capabilities);
    let migration = common::start(&second, &incoming.address(), &slow(), capabilities, Arc::new(()));
    migration.start_postcopy().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &third);
}

/// The source sends no page for longer than the destination's limit. It sends keep-alives instead, and nothing after
/// EOF.
#[test]
fn background_that_is_slower_than_every_limit_on_silence_ends() {
    let Some(capabilities) = capabilities(true) else { return };
    let limits = sterna::WaitLimits { stall: Duration::from_millis(400), ..common::LIMITS };
    // One chunk every two seconds.
    let params = Parameters { max_postcopy_bandwidth_bytes: 128 << 10, limits, ..slow() };
    let config = ProcessConfig { fill: Fill::Random(7), working_set_pages: Some(16), ..config() };
    let pair = Pair::begin(&config, &params, capabilities).switch();
    until_status(&pair.migration, Status::PostcopyActive);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(pair.migration.status(), Status::PostcopyActive);
    pair.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    pair.arrives();
}

#[test]
fn guest_that_has_been_copied_brings_only_what_it_wrote_since() {
    let Some(capabilities) = capabilities(true) else { return };
    // A round takes 50 ms, so precopy ends only if the writers get no CPU time for that long.
    let config = ProcessConfig { rate: 0, working_set_pages: Some(256), ..config() };
    let params = Parameters { downtime_limit: Duration::ZERO, ..slow() };
    let pair = Pair::begin(&config, &params, capabilities).after_rounds(3).switch().arrives();

    let statistics = pair.migration.statistics();
    let total = statistics.ram_total_bytes;
    assert!(statistics.postcopy_bytes < total / 4, "most of it was there: {statistics:?}");
}

#[test]
fn guest_that_does_not_converge_goes_on_in_postcopy_by_itself() {
    let Some(capabilities) = capabilities(true) else { return };
    let params = Parameters {
        non_convergence: NonConvergence::Postcopy,
        downtime_limit: Duration::from_millis(1),
        ..slow()
    };
    let pair = Pair::begin(&ProcessConfig { rate: 0, ..config() }, &params, capabilities).arrives();

    assert!(has_warning(&pair.logs[0].events(), &["does not converge"]));
}

#[test]
fn postcopy_begins_by_itself_after_a_time_or_after_rounds() {
    let Some(capabilities) = capabilities(true) else { return };
    // A round takes 50 ms.
    let config = ProcessConfig { rate: 0, working_set_pages: Some(256), ..config() };
    let slow = Parameters { downtime_limit: Duration::ZERO, ..slow() };
    let time = Parameters { postcopy_after: Duration::from_millis(300), ..slow.clone() };
    let rounds = Parameters { postcopy_after_rounds: 2, ..slow.clone() };
    for params in [time, rounds] {
        let begun = std::time::Instant::now();
        let pair = Pair::begin(&config, &params, capabilities).arrives();
        assert!(begun.elapsed() >= params.postcopy_after);
        let statistics = pair.migration.statistics();
        assert!(statistics.rounds_begun > u64::from(params.postcopy_after_rounds), "{statistics:?}");
        assert!(pair.incoming.statistics().postcopy.is_some(), "it ran early");
    }
    // An operator may request postcopy later than the start.
    let pair = Pair::begin(&config, &slow, capabilities).after_rounds(4);
    pair.migration.set_live(|params| params.postcopy_after_rounds = 1).unwrap();
    assert!(pair.arrives().incoming.statistics().postcopy.is_some(), "it ran early");
}

#[test]
fn precopy_that_converges_ends_as_ever_though_postcopy_is_on() {
    let Some(capabilities) = capabilities(true) else { return };
    let config = ProcessConfig { rate: 100, working_set_pages: Some(8), ..config() };
    let pair = Pair::begin(&config, &common::parameters(), capabilities).arrives();
    assert!(pair.incoming.statistics().postcopy.is_none());
    assert!(!pair.told(0, Status::Setup).contains(&Status::PostcopyActive));
}

#[test]
fn paused_guest_arrives_paused_with_all_of_its_pages() {
    let Some(capabilities) = capabilities(true) else { return };
    let (source, target) = common::pair(&config());
    source.pause().unwrap();
    let incoming = common::listen(&target, &slow(), capabilities);
    let migration = common::start(&source, &incoming.address(), &slow(), capabilities, Arc::new(()));
    migration.start_postcopy().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    assert_same_memory(&source, &target);
    target.cont().unwrap();
    common::assert_lives_on(&target);
}

/// Both guests are paused.
fn assert_same_memory(source: &ProcessGuest, target: &ProcessGuest) {
    for (ours, theirs) in source.ram().blocks().iter().zip(target.ram().blocks()) {
        let (mut one, mut other) = ([0; PAGE_SIZE], [1; PAGE_SIZE]);
        for page in 0..ours.pages() {
            ours.read(page * PAGE_SIZE as u64, &mut one).unwrap();
            theirs.read(page * PAGE_SIZE as u64, &mut other).unwrap();
            assert_eq!(one, other, "page {page} of {}", ours.name());
        }
    }
}

#[test]
fn background_keeps_to_its_bandwidth_and_requests_do_not_wait_for_it() {
    let Some(capabilities) = capabilities(true) else { return };
    let capabilities = Capabilities { postcopy_blocktime: true, ..capabilities };
    let params = Parameters { max_postcopy_bandwidth_bytes: 8 << 20, ..slow() };
    let config = ProcessConfig { fill: Fill::Random(7), working_set_pages: Some(64), ..config() };
    let pair = Pair::begin(&config, &params, capabilities).switch();
    until_status(&pair.migration, Status::PostcopyActive);
    // The writers get their pages long before all background pages are sent.
    assert!(pair.target.wait_progress(200, Duration::from_secs(30)), "it waits for the background");
    assert_eq!(pair.migration.status(), Status::PostcopyActive);
    pair.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    let pair = pair.arrives();

    let times = pair.incoming.statistics().postcopy.unwrap().times.expect("it was measured");
    assert!(!times.latency.is_zero() && times.latency_buckets.iter().sum::<u64>() > 0, "{times:?}");
}

#[test]
fn memory_of_another_kind_works_too() {
    let Some(capabilities) = capabilities(true) else { return };
    let config = ProcessConfig { backing: Backing::Anonymous, ..config() };
    Pair::begin(&config, &slow(), capabilities).switch().arrives();
}

#[test]
fn huge_pages_come_whole() {
    let Some(capabilities) = capabilities(true) else { return };
    let config = ProcessConfig { backing: Backing::Huge2M, ..config() };
    if let Err(error) = ProcessGuest::waiting(config.clone()).map(drop) {
        tracing::warn!("skipped: {error}");
        return;
    }
    Pair::begin(&config, &slow(), capabilities).switch().arrives();
}

#[test]
fn what_does_not_go_with_postcopy_is_refused_by_its_name() {
    let (source, target) = common::pair(&config());
    let on = Capabilities { postcopy_ram: true, ..Capabilities::default() };
    let begin = |to: &str, params: Parameters, capabilities| {
        let vm = Arc::clone(&source) as _;
        Migration::start(vm, &to.parse().unwrap(), params, capabilities, Arc::new(())).map(drop)
    };
    let tcp = "tcp:127.0.0.1:1";
    let auto = Parameters { non_convergence: NonConvergence::Postcopy, ..slow() };
    let after = Parameters { postcopy_after: Duration::from_secs(1), ..slow() };
    let rounds = Parameters { postcopy_after_rounds: 1, ..slow() };
    let cpr = Parameters { mode: sterna::MigrationMode::CprTransfer, ..slow() };
    for (refused, word) in [
        (begin("file:/nowhere", slow(), on), "a file"),
        (begin(tcp, slow(), Capabilities { return_path: false, ..on }), "return_path"),
        (begin("unix:/nowhere", cpr, on), "cpr-transfer"),
        (begin(tcp, auto, Capabilities::default()), "non_convergence"),
        (begin(tcp, after, Capabilities::default()), "postcopy_after"),
        (begin(tcp, rounds, Capabilities::default()), "postcopy_after_rounds"),
        (
            begin(tcp, slow(), Capabilities { postcopy_ram: false, postcopy_preempt: true, ..on }),
            "postcopy_preempt",
        ),
    ] {
        let error = refused.unwrap_err();
        let StartError::Settings(
            SettingsError::PostcopyExcludes { what } | SettingsError::NeedsPostcopy { what },
        ) = error
        else {
            panic!("{error}")
        };
        assert!(what.contains(word), "{what}");
    }
    let at = "file:/nowhere".parse().unwrap();
    let vm: Arc<dyn TargetVm> = target;
    let error = Incoming::listen(vm, &at, slow(), on, Arc::new(())).map(drop).unwrap_err();
    let StartError::Settings(SettingsError::PostcopyExcludes { what }) = error else { panic!("{error}") };
    assert_eq!(what, "a file");
}

#[test]
fn sides_that_are_set_differently_part_while_the_guest_runs_at_the_source() {
    let Some(on) = capabilities(true) else { return };
    let no_preempt = Capabilities { postcopy_preempt: false, ..on };
    let off = Capabilities::default();
    for (ours, theirs, word) in [
        (on, off, "postcopy-ram"),
        (on, no_preempt, "postcopy-preempt"),
        (no_preempt, on, "postcopy-preempt"),
    ] {
        let (source, target) = common::pair(&config());
        let incoming = common::listen(&target, &slow(), theirs);
        let migration = common::start(&source, &incoming.address(), &slow(), ours, Arc::new(()));
        let outcome = migration.wait();
        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        assert!(error.to_string().contains(word), "{error}");
        common::assert_lives_on(&source);
    }
}

#[test]
fn switch_is_refused_without_the_capability_and_after_the_end() {
    let (source, target) = common::pair(&config());
    let plain = Capabilities::default();
    let incoming = common::listen(&target, &slow(), plain);
    let migration = common::start(&source, &incoming.address(), &slow(), plain, Arc::new(()));
    assert!(matches!(migration.start_postcopy(), Err(Refusal::NoPostcopy)));
    migration.cancel().unwrap();
    migration.wait();
    let Some(capabilities) = capabilities(false) else { return };
    let pair = Pair::begin(&config(), &slow(), capabilities).switch().arrives();
    assert!(pair.migration.start_postcopy().is_err());
    assert!(pair.migration.cancel().is_err());
}

#[test]
fn postcopy_goes_over_tls() {
    let Some(capabilities) = capabilities(true) else { return };
    let certificates = crate::certificates::good_directory();
    let tls = |endpoint| {
        let credentials = TlsCredentials::from_directory(certificates.path(), endpoint, false).unwrap();
        Some(Tls::new(Arc::new(credentials)))
    };
    let (source, target) = common::pair(&config());
    let theirs = Parameters { tls: tls(TlsEndpoint::Server), ..slow() };
    let incoming = common::listen(&target, &theirs, capabilities);
    let ours = Parameters { tls: tls(TlsEndpoint::Client), ..slow() };
    let migration = common::start(&source, &incoming.address(), &ours, capabilities, Arc::new(()));
    migration.start_postcopy().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &target);
    assert!(migration.statistics().postcopy_bytes > 0);
}
