//! The system calls of live saves: each case saves a writing guest, with or without a fault, and then saves it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna::ram::Backing;
use sterna::sandbox::{Feature, Syscall};
use sterna::{
    Address, Arrival, Capabilities, ChangeLog, Direct, Incoming, LiveSave, LiveSaveOptions, LiveSaved,
    MigrationError, Parameters, Snapshot, SourceVm, TargetVm, Vm,
};

use crate::calls::no_listener;
use crate::checked::{self, Scenario};
use crate::child::is_child;
use crate::dirty::{Log, dirty_source, write_steadily};
use crate::locked::{DESTINATION_CALLER, DRIVER, Locked, Outside, SOURCE_CALLER};
use crate::recorder::mark;
use crate::scenes::{Place, Scene, Sides, Stage, address};
use crate::support::eventually;
use crate::support::proxy::{Proxy, Verdict};
use crate::vm::{LockedVm, PAGES};

/// What disturbs the first save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Cancel,
    /// The connection is cut.
    Cut,
    /// The waiting VM ends.
    DestinationEnds,
    NoListener,
    /// A write waits for longer than allowed.
    HeldTooLong,
}

struct Case {
    scene: Scene,
    fault: Fault,
    /// The dirty source of a series of saves; `None` for saves that know no changes.
    series: Option<Log>,
    by_device: bool,
}

impl Case {
    fn plain(scene: Scene) -> Self {
        Self { scene, fault: Fault::None, series: None, by_device: false }
    }

    fn is_file(&self) -> bool {
        self.scene.place == Place::File
    }
}

impl Scenario for Case {
    fn name(&self) -> &'static str {
        self.scene.name
    }

    fn features(&self) -> Vec<Feature> {
        let scene = &self.scene;
        let all = [
            (true, Feature::FilterPerThread),
            (true, Feature::LiveSave),
            (scene.backing != Backing::Memfd, Feature::PrivateMemory),
            (!self.is_file(), Feature::Sockets),
            (scene.place == Place::Tcp, Feature::Tcp),
            (scene.place == Place::Unix, Feature::Unix),
            (scene.is_tls, Feature::Tls),
            (self.is_file(), Feature::File),
            (scene.params.direct_io != Direct::Off, Feature::DirectIo),
            (self.by_device, Feature::UserfaultfdByDevice),
            (self.series == Some(Log::Kvm), Feature::KvmDirtyLog),
            (self.series == Some(Log::KvmRing), Feature::KvmDirtyRing),
        ];
        all.into_iter().filter_map(|(is_used, feature)| is_used.then_some(feature)).collect()
    }

    fn lacks_userfaultfd(&self) -> Option<u32> {
        self.by_device.then_some(SOURCE_CALLER)
    }
}

fn cases() -> Vec<Case> {
    let plain = Case::plain;
    let file = |name| Scene::new(name, Place::File);
    let tcp = |name| Scene::new(name, Place::Tcp);
    vec![
        plain(file("live")),
        plain(file("live-anonymous").anonymous()),
        plain(file("live-direct").direct()),
        plain(tcp("live-tcp")),
        plain(Scene::new("live-unix", Place::Unix)),
        plain(tcp("live-tls").tls()),
        Case { by_device: true, ..plain(file("live-by-device")) },
        Case { series: Some(Log::Software), ..plain(file("live-series")) },
        Case { series: Some(Log::Kvm), ..plain(file("live-series-kvm")) },
        Case { series: Some(Log::KvmRing), ..plain(file("live-series-kvm-ring")) },
        Case { fault: Fault::Cancel, ..plain(file("live-cancel")) },
        Case { fault: Fault::Cancel, series: Some(Log::Kvm), ..plain(file("live-cancel-series")) },
        Case { fault: Fault::Cancel, ..plain(tcp("live-cancel-tcp")) },
        Case { fault: Fault::HeldTooLong, ..plain(file("live-held-too-long")) },
        Case { fault: Fault::Cut, ..plain(tcp("live-cut")) },
        Case { fault: Fault::Cut, ..plain(tcp("live-cut-tls").tls()) },
        Case { fault: Fault::DestinationEnds, ..plain(tcp("live-destination-ends")) },
        Case { fault: Fault::NoListener, ..plain(tcp("live-no-listener")) },
    ]
}

/// The VM that loads an image or waits for a copy, with its own filters.
fn listen((case, stage, locked): Env<'_>, at: &Address) -> (Arc<LockedVm>, Incoming) {
    let target = LockedVm::new(case.scene.backing, Vec::new(), false);
    let vm: Arc<dyn TargetVm> = target.clone();
    let params = Parameters { max_bandwidth_bytes: 0, ..stage.params(&case.scene, locked, 1) };
    let incoming = locked
        .on(DESTINATION_CALLER, || Incoming::listen(vm, at, params, Capabilities::default(), Arc::new(())));
    (target, incoming.unwrap())
}

type Env<'a> = (&'a Case, &'a Stage, &'a Locked);

fn save(
    (case, stage, locked): Env<'_>,
    source: &Arc<LockedVm>,
    to: &Address,
    options: LiveSaveOptions,
    bandwidth: u64,
) -> LiveSave {
    let vm: Arc<dyn SourceVm> = source.clone();
    let params = stage.params(&case.scene, locked, 0);
    let params = Parameters { max_bandwidth_bytes: bandwidth, replace_file: true, ..params };
    let start = || LiveSave::start(vm, to, params, Capabilities::default(), options, Arc::new(()));
    locked.at_source(start).unwrap()
}

fn perform(case: &Case, stage: &Stage, outside: &Outside, locked: &Locked) -> bool {
    mark(DRIVER);
    let env = (case, stage, locked);
    let source = LockedVm::new(case.scene.backing, Vec::new(), true);
    let Some(dirty) = dirty_source(case.series.unwrap_or(Log::Software), &source) else { return false };
    let source = source.with_dirty(dirty);
    let vm: Arc<dyn SourceVm> = source.clone();
    let log = case.series.map(|_| locked.at_source(|| ChangeLog::begin(vm)).unwrap());
    let options = |since| {
        let mut options = LiveSaveOptions::default();
        options.changes = log.clone().map(|log| Snapshot { log, since });
        options
    };

    let first = disturbed(env, &source, options(None), outside);
    let is_disturbed = case.fault != Fault::None;
    assert_eq!(first.is_err(), is_disturbed, "{}: {first:?}", case.scene.name);
    assert!(source.is_running() && source.ram().custody().may_leave(), "{}", case.scene.name);
    // Nothing is protected any more.
    (0..PAGES).step_by(32).for_each(|page| source.write(page, 9));

    let since = first.ok().and_then(|saved| saved.number);
    if let (Some(log), Some(_)) = (&log, since) {
        let layer = save(env, &source, &address(&case.scene, stage), options(since), 0).wait().unwrap();
        assert!(layer.normal_pages + layer.zero_pages < PAGES, "only changes: {layer:?}");
        locked.at_source(|| log.end());
    }
    let whole = if since.is_some() { LiveSaveOptions::default() } else { options(None) };
    let (loaded, arrival) = copied(env, &source, whole);
    assert!(matches!(arrival, Arrival::Completed(_)), "{}: {arrival:?}", case.scene.name);
    assert!(source.is_equal_to(&loaded), "{}: memory differs", case.scene.name);
    if let Some(log) = log {
        locked.at_source(move || drop(log));
    }
    true
}

/// Saves the guest while it writes, and disturbs the save.
fn disturbed(
    env: Env<'_>,
    source: &Arc<LockedVm>,
    mut options: LiveSaveOptions,
    outside: &Outside,
) -> Result<LiveSaved, MigrationError> {
    let (case, stage, locked) = env;
    let mut at = address(&case.scene, stage);
    let incoming = (!case.is_file()).then(|| listen(env, &at).1);
    let mut proxy = None;
    if let Some(incoming) = &incoming {
        at = incoming.address();
    }
    match case.fault {
        Fault::NoListener => at = no_listener(case.scene.place),
        Fault::Cut => {
            let direct = at.clone();
            let made = outside.run(move || Proxy::new(&direct, Box::new(|_, _, _, _| Verdict::Pass)));
            at = made.address();
            proxy = Some(made);
        }
        Fault::HeldTooLong => {
            options.buffer_bytes = 1 << 16;
            options.longest_hold = Duration::from_millis(1);
        }
        _ => {}
    }
    let writes = Arc::new(AtomicBool::new(true));
    let writer = {
        let (source, writes) = (source.clone(), writes.clone());
        outside.run(move || std::thread::spawn(move || write_steadily(&source, &writes)))
    };
    let save = save(env, source, &at, options, 1 << 20);
    if case.fault != Fault::NoListener {
        let is_sending = || save.statistics().downtime.is_some() && save.statistics().normal_pages > 16;
        eventually("pages are sent", || is_sending() || save.result().is_some());
    }
    match case.fault {
        Fault::Cancel => assert!(locked.at_source(|| save.cancel()), "it had not ended"),
        Fault::DestinationEnds => locked.at_destination(|| incoming.as_ref().unwrap().cancel()).unwrap(),
        Fault::Cut => proxy.as_ref().unwrap().cut(),
        Fault::HeldTooLong => {}
        Fault::None | Fault::NoListener => {
            let unlimited = |params: &mut Parameters| params.max_bandwidth_bytes = 0;
            // It may have ended.
            let _ = save.set_live(unlimited);
        }
    }
    let ended = save.wait();
    writes.store(false, Ordering::Release);
    writer.join().unwrap();
    if let Some(incoming) = incoming {
        if case.fault == Fault::NoListener {
            locked.at_destination(|| incoming.cancel()).unwrap();
        }
        incoming.wait();
    }
    if let Some(proxy) = proxy {
        outside.run(move || drop(proxy));
    }
    ended
}

/// Saves the guest, which does not write, and loads the copy.
fn copied(env: Env<'_>, source: &Arc<LockedVm>, options: LiveSaveOptions) -> (Arc<LockedVm>, Arrival) {
    let at = address(&env.0.scene, env.1);
    if env.0.is_file() {
        save(env, source, &at, options, 0).wait().unwrap();
        let (target, incoming) = listen(env, &at);
        return (target, incoming.wait());
    }
    let (target, incoming) = listen(env, &at);
    save(env, source, &incoming.address(), options, 0).wait().unwrap();
    (target, incoming.wait())
}

#[test]
fn live_saves_make_exactly_the_calls_of_the_table() {
    if is_child() {
        let stage = Stage::new();
        let perform =
            |case: &Case, outside: &Outside, locked: &Locked| perform(case, &stage, outside, locked);
        checked::check(&cases(), perform, |call: &Syscall| call.feature == Feature::LiveSave);
    }
}
