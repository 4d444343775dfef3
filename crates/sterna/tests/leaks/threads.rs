//! A VMM's hook runs first on every thread of a migration. If it panics, the error is typed and the guest stays.

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::certificates::good_directory;
use crate::support::bank::Bank;
use crate::support::{
    TestVm, assert_next_works, assert_reset, case, ended, eventually, short, small, vm, warnings,
};
use sterna::ram::missing_pages::MissingPages;
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, MigrationError, MigrationMode, OnThreadStart,
    Outcome, Parameters, SourceVm, StartError, SystemRefusal, TargetVm, ThreadRole, Tls, TlsCredentials,
    TlsEndpoint,
};

/// Compares the threads on which the hook ran with those that the kernel shows.
struct Watch {
    hooked: Arc<Mutex<BTreeMap<String, ThreadRole>>>,
    seen: Arc<Mutex<BTreeMap<String, String>>>,
    is_over: Arc<AtomicBool>,
    watcher: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    fn begin() -> Self {
        let before: BTreeSet<String> = tasks().into_keys().collect();
        let (seen, is_over) = (Arc::<Mutex<BTreeMap<_, _>>>::default(), Arc::new(AtomicBool::new(false)));
        let (theirs, over) = (Arc::clone(&seen), Arc::clone(&is_over));
        let watch = move || {
            let own = own_task();
            while !over.load(Ordering::SeqCst) {
                let new = tasks().into_iter().filter(|(id, _)| !before.contains(id) && *id != own);
                theirs.lock().unwrap().extend(new);
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let watcher = std::thread::Builder::new().name("test::watcher".to_owned()).spawn(watch).unwrap();
        Self { hooked: Arc::default(), seen, is_over, watcher: Some(watcher) }
    }

    fn hook(&self) -> OnThreadStart {
        let hooked = Arc::clone(&self.hooked);
        Arc::new(move |role| {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            assert!(name.starts_with(role.name()), "{name} is named after its role {role}");
            let before = hooked.lock().unwrap().insert(own_task(), role);
            assert_eq!(before, None, "{name}: the hook ran twice");
        })
    }

    /// The threads without the hook, with their last names.
    fn stray(&self) -> BTreeMap<String, String> {
        let (hooked, mut seen) = (self.hooked.lock().unwrap(), self.seen.lock().unwrap());
        let now = tasks();
        for (id, name) in seen.iter_mut() {
            if let Some(now) = now.get(id) {
                name.clone_from(now);
            }
        }
        let is_stray = |(id, name): &(&String, &String)| !hooked.contains_key(*id) && !is_of_test(name);
        seen.iter().filter(is_stray).map(|(id, name)| (id.clone(), name.clone())).collect()
    }

    /// Ends the watch. Asserts that no thread ran without the hook, and that each of `roles` had a thread.
    fn assert_all(mut self, what: &str, roles: &[ThreadRole]) {
        self.is_over.store(true, Ordering::SeqCst);
        self.watcher.take().unwrap().join().unwrap();
        // A thread that has just begun has the name of the thread that started it, until it gives itself one.
        eventually("the names of new threads", || self.stray().keys().all(|id| !tasks().contains_key(id)));
        let stray = self.stray();
        assert!(stray.is_empty(), "{what}: threads without the hook: {stray:?}");
        let ran: BTreeSet<_> = self.hooked.lock().unwrap().values().copied().collect();
        let missing: Vec<_> = roles.iter().filter(|role| !ran.contains(role)).collect();
        assert!(missing.is_empty(), "{what}: {missing:?} did not run; {ran:?} did");
    }
}

/// Threads of the guests, of io_uring in the kernel, and of the test runner, which has the tests' names.
fn is_of_test(name: &str) -> bool {
    name.is_empty() || name.starts_with("guest-") || name.starts_with("iou-") || name.contains("::")
}

fn own_task() -> String {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_string_lossy().into_owned()
}

fn tasks() -> BTreeMap<String, String> {
    let entries = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let named = entries.map(|entry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        (entry.file_name().to_string_lossy().into_owned(), name.trim().to_owned())
    });
    named.collect()
}

fn hooked(params: &Parameters, hook: &OnThreadStart) -> Parameters {
    // So long that a busy machine ends the precopy, too.
    let downtime_limit = Duration::from_secs(10);
    Parameters { on_thread_start: Some(Arc::clone(hook)), downtime_limit, ..params.clone() }
}

fn pair() -> (Arc<TestVm>, Arc<TestVm>) {
    let calls = Arc::default();
    let banks = [0, 1].map(|number| Bank::new(number, 7, 300_000, 100_000, &calls).read_while_running());
    let theirs = banks.iter().map(|bank| Arc::new(bank.waiting(&Arc::default()))).collect();
    let (source, target) = common::pair(&small());
    let ours = banks.into_iter().map(Arc::new).collect();
    (TestVm::with_banks(source, ours), TestVm::with_banks(target, theirs))
}

/// Without devices with streams. Without multifd, a stream that changes while the guest runs does not converge.
fn plain_pair() -> (Arc<TestVm>, Arc<TestVm>) {
    let (source, target) = common::pair(&small());
    (TestVm::new(source), TestVm::new(target))
}

fn tcp() -> Address {
    "tcp:localhost:0".parse().unwrap()
}

/// The address of a listener, by the host's name: the source has to look it up.
fn by_name(address: &Address) -> Address {
    match address {
        Address::Tcp { port, .. } => Address::Tcp { host: "localhost".to_owned(), port: *port },
        other => other.clone(),
    }
}

/// Migrates with these settings, with the hook on both sides.
fn migrate(
    (source, target): &(Arc<TestVm>, Arc<TestVm>),
    at: &Address,
    [here, there]: [&Parameters; 2],
    capabilities: Capabilities,
    during: impl FnOnce(&Migration),
) {
    let incoming =
        Incoming::listen(Arc::clone(target) as _, at, there.clone(), capabilities, Arc::new(())).unwrap();
    let migration = vm::start(source, &by_name(&incoming.address()), here, capabilities, Arc::new(()));
    during(&migration);
    common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
}

use ThreadRole::{
    Announce, CallDevice, Connect, Greeter, Incoming as Destination, Lane, Listener, LoadDevice, Loader,
    Migration as Source, Package, PageFaults, PreemptChannel, RequestedPages, Resolve, ReturnPath,
    SaveDevice, Start,
};

const BOTH: [ThreadRole; 8] = [Source, ReturnPath, Lane, Destination, Listener, Greeter, Loader, Resolve];

#[test]
fn every_thread_of_a_migration_over_sockets_runs_the_hook_first() {
    case("multifd and TLS", || {
        let directory = good_directory();
        let tls = |endpoint| {
            let credentials = TlsCredentials::from_directory(directory.path(), endpoint, true).unwrap();
            Some(Tls::new(Arc::new(credentials)))
        };
        let (params, capabilities) = common::multifd(3);
        let watch = Watch::begin();
        let params = hooked(&params, &watch.hook());
        let here = Parameters { tls: tls(TlsEndpoint::Client), ..params.clone() };
        let there = Parameters { tls: tls(TlsEndpoint::Server), ..params };
        migrate(&pair(), &tcp(), [&here, &there], capabilities, |_| ());
        let roles = [&BOTH[..], &[SaveDevice, LoadDevice, CallDevice, Connect]].concat();
        watch.assert_all("multifd and TLS", &roles);
    });
    case("one channel over a Unix socket", || {
        let directory = tempfile::tempdir().unwrap();
        let watch = Watch::begin();
        let params = hooked(&common::parameters(), &watch.hook());
        let at = Address::Unix(directory.path().join("m"));
        migrate(&plain_pair(), &at, [&params, &params], Capabilities::default(), |_| ());
        watch.assert_all("unix", &[Source, Destination, Listener, Greeter, Loader]);
    });
}

#[test]
#[allow(clippy::print_stdout, reason = "says why it is skipped")]
fn every_thread_of_a_postcopy_runs_the_hook_first() {
    if let Err(error) = MissingPages::probe() {
        assert!(std::env::var_os("CI").is_none(), "{error}");
        println!("SKIPPED every_thread_of_a_postcopy_runs_the_hook_first: {error}");
        return;
    }
    case("postcopy", || {
        let capabilities =
            Capabilities { postcopy_ram: true, postcopy_preempt: true, ..Capabilities::default() };
        let watch = Watch::begin();
        // Slow enough that precopy does not end by itself.
        let slow = Parameters { max_bandwidth_bytes: 512 << 10, ..common::parameters() };
        let params = hooked(&slow, &watch.hook());
        let switch = |migration: &Migration| {
            eventually("a round", || migration.statistics().rounds_begun > 0);
            migration.start_postcopy().unwrap();
        };
        migrate(&plain_pair(), &tcp(), [&params, &params], capabilities, switch);
        let late = [RequestedPages, PageFaults, Package, PreemptChannel, Start, Announce];
        watch.assert_all("postcopy", &[&BOTH[..], &late].concat());
    });
}

#[test]
fn every_thread_of_a_move_on_one_host_runs_the_hook_first() {
    case("same host", || {
        let directory = tempfile::tempdir().unwrap();
        let watch = Watch::begin();
        let params = Parameters { mode: MigrationMode::CprTransfer, ..common::parameters() };
        let params = hooked(&params, &watch.hook());
        let at = Address::Unix(directory.path().join("m"));
        migrate(&plain_pair(), &at, [&params, &params], Capabilities::default(), |_| ());
        watch.assert_all("same host", &[Source, ReturnPath, Destination, Listener, Greeter, Loader]);
    });
}

#[test]
fn every_thread_of_a_save_and_a_restore_runs_the_hook_first() {
    for mapped_ram in [false, true] {
        case("files", || {
            let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let at = Address::File { path: directory.path().join("image"), offset: 0 };
            let (params, multifd) = common::multifd(3);
            let capabilities = Capabilities { mapped_ram, multifd: mapped_ram, ..multifd };
            let (source, target) = plain_pair();
            let watch = Watch::begin();
            let params = hooked(&params, &watch.hook());
            let migration = vm::start(&source, &at, &params, capabilities, Arc::new(()));
            assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
            let incoming =
                Incoming::listen(Arc::clone(&target) as _, &at, params, capabilities, Arc::new(())).unwrap();
            assert!(matches!(incoming.wait(), Arrival::Completed(_)), "{:?}", incoming.wait());
            watch.assert_all("files", &[Source, Lane, Destination, Loader]);
        });
    }
}

#[test]
fn every_thread_that_resumes_a_saved_guest_runs_the_hook_first() {
    case("resume after a save", || {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = Address::File { path: directory.path().join("image"), offset: 0 };
        let (params, capabilities) = common::multifd(2);
        let capabilities = Capabilities { mapped_ram: true, ..capabilities };
        let calls = Arc::default();
        let banks = [0, 1].map(|number| Arc::new(Bank::new(number, 7, 300_000, 100_000, &calls)));
        let source = TestVm::with_banks(common::pair(&small()).0, banks.into());
        // A call is so short that a `Watch` may miss its thread.
        let roles = Arc::<Mutex<Vec<ThreadRole>>>::default();
        let theirs = Arc::clone(&roles);
        let hook: OnThreadStart = Arc::new(move |role| theirs.lock().unwrap().push(role));
        let params = hooked(&params, &hook);
        let migration = vm::start(&source, &at, &params, capabilities, Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        roles.lock().unwrap().clear();

        migration.resume_saved().unwrap();

        // Of two devices, one is called on the calling thread.
        assert_eq!(*roles.lock().unwrap(), [CallDevice]);
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn every_thread_of_a_dirty_rate_measurement_runs_the_hook_first() {
    case("dirty rate", || {
        let (source, _target) = pair();
        let watch = Watch::begin();
        let (vm, hook): (Arc<dyn SourceVm>, _) = (source, watch.hook());
        let interval = Duration::from_millis(60);
        let measuring = sterna::dirty_rate::DirtyRateMeasurement::start_with(vm, interval, Some(hook));
        measuring.unwrap().wait().unwrap();
        watch.assert_all("dirty rate", &[ThreadRole::DirtyRate]);
    });
}

/// A hook that panics on threads of one role.
fn bomb(at: ThreadRole) -> OnThreadStart {
    Arc::new(move |role| assert!(role != at, "told to panic"))
}

fn assert_names(error: &MigrationError, role: ThreadRole) {
    let MigrationError::Panicked { callback, message } = error else { panic!("{role}: {error}") };
    assert!(callback.contains("on_thread_start") && callback.contains(role.name()), "{role}: {callback}");
    assert!(message.contains("told to panic"), "{role}: {message}");
}

#[test]
fn hook_that_panics_at_the_source_fails_the_migration_and_the_guest_lives_on() {
    for role in [Source, ReturnPath, Lane, Connect, Resolve, SaveDevice] {
        case(role.name(), || {
            let (source, target) = pair();
            let (params, capabilities) = common::multifd(3);
            let incoming = Incoming::listen(
                Arc::clone(&target) as Arc<dyn TargetVm>,
                &tcp(),
                Parameters { limits: short().limits, ..params.clone() },
                capabilities,
                Arc::new(()),
            );
            let incoming = incoming.unwrap();
            let params = hooked(&params, &bomb(role));
            let to = by_name(&incoming.address());
            let migration = vm::start(&source, &to, &params, capabilities, Arc::new(()));
            let outcome = migration.wait();
            let Outcome::Failed { error, held: false } = outcome else { panic!("{role}: {outcome:?}") };
            match role {
                // The resolver's error keeps the panic as its cause.
                Resolve => assert!(error.to_string().contains("on_thread_start panicked"), "{error}"),
                _ => assert_names(&error, role),
            }
            ended(&incoming);
            common::assert_lives_on(&source.guest);
            assert_reset(&target);
        });
    }
}

#[test]
fn hook_that_panics_at_the_destination_fails_the_migration_and_the_guest_stays_at_the_source() {
    for role in [Destination, Listener, Greeter, Loader, Lane, LoadDevice] {
        case(role.name(), || {
            let (source, target) = pair();
            let (params, capabilities) = common::multifd(3);
            let params = Parameters { limits: short().limits, ..params };
            let log = Arc::new(common::Log::default());
            let theirs = hooked(&params, &bomb(role));
            let waiting: Arc<dyn TargetVm> = Arc::clone(&target) as _;
            let listening = Incoming::listen(waiting, &tcp(), theirs, capabilities, log.clone());
            if role == Destination {
                let Err(StartError::System(SystemRefusal::Engine(error))) = &listening else {
                    panic!("{role}: it listens");
                };
                assert_names(error, role);
                return assert_next_works(&source, &target);
            }
            let incoming = listening.unwrap();
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            let outcome = migration.wait();
            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{role}: {outcome:?}");
            match (role, ended(&incoming)) {
                (Greeter, _) => {
                    let warnings = warnings(&log.events());
                    assert!(warnings.iter().any(|text| text.contains("on_thread_start")), "{warnings:?}");
                }
                (_, Arrival::Failed(error)) => assert_names(&error, role),
                (_, other) => panic!("{role}: {other:?}"),
            }
            common::assert_lives_on(&source.guest);
            assert_reset(&target);
        });
    }
}
