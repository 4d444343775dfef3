//! The system calls of each feature.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna::ram::Backing;
use sterna::sandbox::{Feature, Syscall};
use sterna::{
    Address, Arrival, Compression, Direct, Incoming, MigrationMode, OnThreadStart, Outcome, SettingLimits,
    SharedSettings, Status, TargetVm,
};

use crate::checked::{self, Scenario};
use crate::child::is_child;
use crate::common::Log as Observed;
use crate::dirty::{Log, dirty_source, write_until};
use crate::locked::{DESTINATION_CALLER, DRIVER, Locked, Outside, SOURCE_CALLER};
use crate::recorder::mark;
use crate::scenes::{Place, Scene, Sides, Stage, address, cut_rdma, listen, rdma_address, start};
use crate::support::pairs::banks;
use crate::support::proxy::{Proxy, Verdict};
use crate::support::{eventually, until_status};
use crate::vm::LockedVm;

impl Sides for Locked {
    fn at_source<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.on(SOURCE_CALLER, act)
    }
    fn at_destination<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.on(DESTINATION_CALLER, act)
    }
    fn hooks(&self) -> [Option<OnThreadStart>; 2] {
        let hook = self.hook();
        [Some(Arc::clone(&hook)), Some(hook)]
    }
}

/// What disturbs a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The source's operator cancels.
    Cancel,
    /// The destination's operator cancels.
    DestinationEnds,
    /// The destination cannot start the guest.
    StartFails,
    /// No destination listens.
    NoListener,
    /// The same, and this process has no destination, either.
    Alone,
    /// All connections are cut once.
    Cut,
    /// The process is stopped and continued, as by a debugger or by the host's suspend.
    Stopped,
}

pub struct Case {
    pub scene: Scene,
    pub fault: Fault,
    pub log: Log,
    /// Postcopy's destination needs /dev/userfaultfd.
    pub by_device: bool,
    /// The destination makes its VM from the source's configuration.
    pub configures: bool,
}

impl Case {
    /// A migration that nothing disturbs.
    pub fn plain(scene: Scene) -> Self {
        Self { scene, fault: Fault::None, log: Log::Software, by_device: false, configures: false }
    }
}

impl Scenario for Case {
    fn name(&self) -> &'static str {
        self.scene.name
    }

    fn features(&self) -> Vec<Feature> {
        let scene = &self.scene;
        let on = &scene.capabilities;
        let is_file = scene.place == Place::File;
        let is_socket = matches!(scene.place, Place::Tcp | Place::Unix);
        let all = [
            (true, Feature::FilterPerThread),
            (scene.backing != Backing::Memfd, Feature::PrivateMemory),
            (scene.backing.is_huge(), Feature::HugePages),
            (is_socket, Feature::Sockets),
            (scene.place == Place::Tcp, Feature::Tcp),
            (scene.place == Place::Unix, Feature::Unix),
            (is_socket && on.multifd, Feature::Multifd),
            (scene.is_tls, Feature::Tls),
            (is_file, Feature::File),
            (scene.place == Place::Rdma, Feature::Rdma),
            (scene.params.direct_io != Direct::Off, Feature::DirectIo),
            (on.postcopy_ram, Feature::Postcopy),
            (self.by_device, Feature::UserfaultfdByDevice),
            (scene.params.mode == MigrationMode::CprTransfer, Feature::SameHost),
            (self.log == Log::Kvm, Feature::KvmDirtyLog),
            (self.log == Log::KvmRing, Feature::KvmDirtyRing),
            (self.log == Log::Userfaultfd, Feature::UffdDirtyLog),
        ];
        all.into_iter().filter_map(|(is_used, feature)| is_used.then_some(feature)).collect()
    }
    fn lacks_userfaultfd(&self) -> Option<u32> {
        self.by_device.then_some(DESTINATION_CALLER)
    }
}

fn cases() -> Vec<Case> {
    let plain = Case::plain;
    let mut cases: Vec<Case> = [
        Scene::new("tcp", Place::Tcp),
        Scene::new("tcp-multifd-anonymous", Place::Tcp).multifd().anonymous(),
        Scene::new("zstd", Place::Tcp).compressed(Compression::Zstd),
        Scene::new("zlib", Place::Tcp).compressed(Compression::Zlib),
        Scene::new("unix", Place::Unix),
        Scene::new("unix-multifd", Place::Unix).multifd(),
        Scene::new("tls", Place::Tcp).tls(),
        Scene::new("tls-multifd", Place::Tcp).tls().multifd(),
        Scene::new("streams", Place::Tcp).multifd().streams(),
        Scene::new("file", Place::File),
        Scene::new("mapped", Place::File).mapped(Direct::Off),
        Scene::new("mapped-multifd-direct", Place::File).mapped(Direct::Wanted).multifd(),
        Scene::new("postcopy", Place::Tcp).postcopy(),
        Scene::new("postcopy-multifd", Place::Tcp).postcopy().multifd(),
        Scene::new("postcopy-tls", Place::Tcp).postcopy().tls(),
        Scene::new("same-host", Place::Unix).same_host(),
    ]
    .map(plain)
    .into();
    let slow = |name| Scene::new(name, Place::Tcp).multifd().limited();
    cases.extend([
        Case { fault: Fault::Cancel, ..plain(slow("cancel")) },
        Case { fault: Fault::Cancel, ..plain(slow("cancel-anonymous").anonymous()) },
        Case {
            fault: Fault::Cancel,
            ..plain(Scene::new("cancel-file", Place::File).mapped(Direct::Off).limited())
        },
        Case { fault: Fault::DestinationEnds, ..plain(slow("destination-ends")) },
        Case { fault: Fault::StartFails, ..plain(Scene::new("start-fails", Place::Tcp)) },
        Case {
            fault: Fault::StartFails,
            ..plain(Scene::new("start-fails-same-host", Place::Unix).same_host())
        },
        Case { fault: Fault::NoListener, ..plain(Scene::new("no-listener", Place::Tcp)) },
        Case { fault: Fault::Cut, ..plain(slow("cut")) },
        Case { fault: Fault::Cut, ..plain(slow("cut-reconnect").reconnect()) },
        Case { fault: Fault::Stopped, ..plain(slow("stopped")) },
        Case { configures: true, ..plain(Scene::new("configured", Place::Tcp).multifd()) },
        Case { by_device: true, ..plain(Scene::new("postcopy-by-device", Place::Tcp).postcopy()) },
        Case { configures: true, ..plain(Scene::new("configured-postcopy", Place::Tcp).postcopy()) },
        Case {
            configures: true,
            by_device: true,
            ..plain(Scene::new("configured-postcopy-by-device", Place::Tcp).postcopy())
        },
        Case { log: Log::Userfaultfd, ..plain(Scene::new("userfaultfd", Place::Tcp)) },
        Case { log: Log::Userfaultfd, ..plain(Scene::new("userfaultfd-anonymous", Place::Tcp).anonymous()) },
        Case { log: Log::Kvm, ..plain(Scene::new("kvm", Place::Tcp)) },
        Case { log: Log::KvmRing, ..plain(Scene::new("kvm-ring", Place::Tcp)) },
    ]);
    cases
}

fn perform(case: &Case, stage: &Stage, outside: &Outside, locked: &Locked) -> bool {
    mark(DRIVER);
    let scene = &case.scene;
    let [saving, loading] = banks(if scene.has_streams { 2 } else { 0 });
    let source = LockedVm::new(scene.backing, saving, true);
    let target = LockedVm::new(scene.backing, loading, false);
    let Some(dirty) = dirty_source(case.log, &source) else { return false };
    let source = source.with_dirty(dirty);
    target.refuses_start.store(case.fault == Fault::StartFails, Ordering::Release);
    let logs = [Arc::new(Observed::default()), Arc::new(Observed::default())];
    let at = address(scene, stage);
    let env = (scene, stage, locked);
    let writes = Arc::new(AtomicBool::new(true));
    let writer = {
        let (source, writes) = (source.clone(), writes.clone());
        outside.run(move || std::thread::spawn(move || write_until(&source, &writes)))
    };
    let (outcome, arrival) = if scene.place == Place::File {
        let migration = start(env, source.clone(), &at, &logs[0]);
        if case.fault == Fault::Cancel {
            until_status(&migration, Status::Active);
            locked.at_source(|| migration.cancel()).unwrap();
        }
        let outcome = migration.wait();
        writes.store(false, Ordering::Release);
        let arrival =
            (case.fault == Fault::None).then(|| listen(env, target.clone(), &at, &logs[1]).unwrap().wait());
        (outcome, arrival)
    } else if case.fault == Fault::Alone {
        (start(env, source.clone(), &no_listener(scene.place), &logs[0]).wait(), None)
    } else {
        let incoming = if case.configures {
            listen_configured(env, target.clone(), &at, &logs[1])
        } else {
            listen(env, target.clone(), &at, &logs[1]).unwrap()
        };
        let mut to = incoming.address();
        let mut proxy = None;
        match case.fault {
            Fault::NoListener => to = no_listener(scene.place),
            Fault::Cut if scene.place == Place::Tcp => {
                let direct = to.clone();
                let made = outside.run(move || Proxy::new(&direct, Box::new(|_, _, _, _| Verdict::Pass)));
                to = made.address();
                proxy = Some(made);
            }
            _ => {}
        }
        let migration = start(env, source.clone(), &to, &logs[0]);
        if scene.capabilities.postcopy_ram {
            migration.start_postcopy().unwrap();
        }
        match case.fault {
            Fault::Cancel | Fault::DestinationEnds | Fault::Cut | Fault::Stopped => {
                until_status(&migration, Status::Active);
            }
            _ => {}
        }
        match case.fault {
            Fault::Cancel => locked.at_source(|| migration.cancel()).unwrap(),
            Fault::DestinationEnds => locked.at_destination(|| incoming.cancel()).unwrap(),
            Fault::Cut => {
                // A connection that breaks in the handshake is not replaced.
                eventually("pages are sent", || migration.statistics().normal_pages > 64);
                match &proxy {
                    Some(proxy) => proxy.cut(),
                    None => outside.run(cut_rdma),
                }
                let unlimited = |params: &mut sterna::Parameters| params.max_bandwidth_bytes = 0;
                let _ = migration.set_live(unlimited);
            }
            Fault::Stopped => outside.run(stop_and_continue),
            _ => {}
        }
        let outcome = migration.wait();
        if case.fault == Fault::NoListener {
            locked.at_destination(|| incoming.cancel()).unwrap();
        }
        let arrival = incoming.wait();
        if let Some(proxy) = proxy {
            outside.run(move || drop(proxy));
        }
        (outcome, Some(arrival))
    };
    writes.store(false, Ordering::Release);
    let _ = writer.join();
    let arrives =
        matches!(case.fault, Fault::None | Fault::Stopped) || scene.params.reconnect_window > Duration::ZERO;
    let name = scene.name;
    assert_eq!(matches!(outcome, Outcome::Completed), arrives, "{name}: {outcome:?}; {arrival:?}");
    if arrives {
        assert!(matches!(arrival, Some(Arrival::Completed(_))), "{name}: {arrival:?}");
        assert!(source.is_equal_to(&target), "{name}: memory differs");
    }
    true
}

/// Stops this process and continues it. Waits that have a time limit then continue with `restart_syscall`.
fn stop_and_continue() {
    let script = "kill -STOP $PPID; sleep 0.1; kill -CONT $PPID";
    assert!(std::process::Command::new("sh").args(["-c", script]).status().unwrap().success());
}

/// An address at which no destination listens.
pub fn no_listener(place: Place) -> Address {
    match place {
        Place::Rdma => format!("rdma:{}:1", rdma_address().unwrap()).parse().unwrap(),
        _ => "tcp:127.0.0.1:1".parse().unwrap(),
    }
}

/// Starts a destination that has no VM before the source has sent its configuration.
fn listen_configured(
    (scene, stage, locked): (&Scene, &Stage, &Locked),
    vm: Arc<LockedVm>,
    at: &Address,
    log: &Arc<Observed>,
) -> Incoming {
    let params = stage.params(scene, locked, 1);
    let make = move |_: &[u8]| Ok(vm as Arc<dyn TargetVm>);
    let on = scene.capabilities;
    // Whether postcopy is used is known only with the source's settings.
    let as_source = || SharedSettings::AsSource(SettingLimits::default());
    let shared = if on.postcopy_ram { as_source() } else { SharedSettings::AsHere };
    locked.at_destination(|| Incoming::listen_with(at, params, on, shared, log.clone(), make).unwrap())
}

/// Runs migrations under their filters.
pub fn check(cases: &[Case], checked: impl Fn(&Syscall) -> bool) {
    let stage = Stage::new();
    checked::check(cases, |case, outside, locked| perform(case, &stage, outside, locked), checked);
}

#[test]
fn every_feature_makes_exactly_the_calls_of_the_table() {
    if is_child() {
        // The lab runs the cases of RDMA and of huge pages. Live saves, protections and lazy restores have tests of their own.
        let has_own_test = |feature| {
            use Feature as F;
            let lab = [F::Rdma, F::HugePages];
            lab.contains(&feature)
                || [F::LiveSave, F::Standby, F::StandbyCopyOnWrite, F::LazyRestore].contains(&feature)
        };
        check(&cases(), |call| !has_own_test(call.feature));
    }
}
