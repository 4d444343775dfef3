//! The system calls of protections: each case protects a writing guest, with or without a fault. If the guest stays at its
//! primary, it is protected again and handed over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna::ram::Backing;
use sterna::sandbox::{Feature, Syscall};
use sterna::{Address, Capabilities, Vm};
use sterna_standby::machines::{primary, standby};
use sterna_standby::{CheckpointCopy, Primary, Standby};

use crate::checked::{self, Scenario};
use crate::child::is_child;
use crate::dirty::{Log, dirty_source, write_often, write_steadily};
use crate::locked::{DRIVER, Locked, Outside, SOURCE_CALLER};
use crate::recorder::mark;
use crate::sides::{Arbiter, Env, Patient, Settings, Stage, protect, stand_by};
use crate::support::proxy::{Proxy, Verdict};
use crate::support::{PATIENCE, eventually};
use crate::vm::LockedVm;

/// The end of the first protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The guest is handed over as planned.
    HandOver,
    /// The operator ends the protection.
    Unprotect,
    /// The connections are cut, and the standby takes over.
    Lost,
    /// The connections are cut, and the arbiter decides for the primary.
    Alone,
    /// The connections are cut before a checkpoint is held.
    CutInSeeding,
    /// The operator cancels before a checkpoint is held.
    CancelInSeeding,
    /// The primary connects to an address at which no standby listens.
    NoStandby,
}

struct Case {
    name: &'static str,
    settings: Settings,
    backing: Backing,
    log: Log,
    /// Write protection needs /dev/userfaultfd.
    by_device: bool,
    end: End,
}

impl Case {
    fn new(name: &'static str, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Settings::plain();
        change(&mut settings);
        let (backing, log) = (Backing::Memfd, Log::Software);
        Self { name, settings, backing, log, by_device: false, end: End::HandOver }
    }

    fn ends(name: &'static str, end: End) -> Self {
        let change = |settings: &mut Settings| match end {
            // The standby asks the arbiter after the primary's lease.
            End::Lost | End::Alone => settings.lease = Duration::from_secs(3),
            End::CutInSeeding | End::CancelInSeeding => settings.params.max_bandwidth_bytes = 1 << 20,
            _ => {}
        };
        Self { end, ..Self::new(name, change) }
    }
}

impl Scenario for Case {
    fn name(&self) -> &'static str {
        self.name
    }

    fn features(&self) -> Vec<Feature> {
        let settings = &self.settings;
        let all = [
            (true, Feature::FilterPerThread),
            (true, Feature::Sockets),
            (true, Feature::Standby),
            (settings.copy != CheckpointCopy::Copy, Feature::StandbyCopyOnWrite),
            (self.backing != Backing::Memfd, Feature::PrivateMemory),
            (!settings.is_unix, Feature::Tcp),
            (settings.is_unix, Feature::Unix),
            (settings.capabilities.multifd, Feature::Multifd),
            (settings.is_tls, Feature::Tls),
            (self.by_device, Feature::UserfaultfdByDevice),
            (self.log == Log::Kvm, Feature::KvmDirtyLog),
            (self.log == Log::KvmRing, Feature::KvmDirtyRing),
            (self.log == Log::Userfaultfd, Feature::UffdDirtyLog),
        ];
        all.into_iter().filter_map(|(is_used, feature)| is_used.then_some(feature)).collect()
    }

    fn lacks_userfaultfd(&self) -> Option<u32> {
        self.by_device.then_some(SOURCE_CALLER)
    }
}

fn multifd(settings: &mut Settings) {
    settings.capabilities = Capabilities { multifd: true, ..Capabilities::default() };
    settings.params.multifd_channels = 2;
}

fn on_write(settings: &mut Settings) {
    settings.copy = CheckpointCopy::CopyOnWrite;
}

fn cases() -> Vec<Case> {
    let plain = |name| Case::new(name, |_| {});
    vec![
        plain("standby"),
        Case { backing: Backing::Anonymous, ..plain("standby-anonymous") },
        Case::new("standby-multifd", multifd),
        Case { backing: Backing::Anonymous, ..Case::new("standby-multifd-anonymous", multifd) },
        Case::new("standby-differences", |settings| settings.capabilities.xbzrle = true),
        Case::new("standby-on-write", on_write),
        Case { backing: Backing::Anonymous, ..Case::new("standby-on-write-anonymous", on_write) },
        Case { by_device: true, ..Case::new("standby-on-write-by-device", on_write) },
        Case::new("standby-unix", |settings| settings.is_unix = true),
        Case::new("standby-tls", |settings| settings.is_tls = true),
        Case { log: Log::Kvm, ..plain("standby-kvm") },
        Case { log: Log::KvmRing, ..plain("standby-kvm-ring") },
        Case { log: Log::Userfaultfd, ..plain("standby-userfaultfd") },
        Case::ends("standby-unprotect", End::Unprotect),
        Case { backing: Backing::Anonymous, ..Case::ends("standby-unprotect-anonymous", End::Unprotect) },
        Case::ends("standby-lost", End::Lost),
        Case { backing: Backing::Anonymous, ..Case::ends("standby-lost-anonymous", End::Lost) },
        Case::ends("standby-alone", End::Alone),
        Case::ends("standby-cut-in-seeding", End::CutInSeeding),
        Case::ends("standby-cancel-in-seeding", End::CancelInSeeding),
        Case::ends("standby-no-standby", End::NoStandby),
    ]
}

fn perform(case: &Case, stage: &Stage, outside: &Outside, locked: &Locked) -> bool {
    mark(DRIVER);
    let source = LockedVm::new(case.backing, Vec::new(), true);
    let Some(dirty) = dirty_source(case.log, &source) else { return false };
    let source = source.with_dirty(dirty);
    let writes = Arc::new(AtomicBool::new(true));
    let write = if case.settings.copy == CheckpointCopy::CopyOnWrite { write_often } else { write_steadily };
    let writer = {
        let (source, writes) = (source.clone(), writes.clone());
        outside.run(move || std::thread::spawn(move || write(&source, &writes)))
    };
    let mut settings = case.settings.clone();
    let stays = first((&settings, stage, locked), case, &source, outside);
    if stays {
        assert!(source.is_running() && source.ram().custody().may_leave(), "{}", case.name);
        settings.params.max_bandwidth_bytes = 0;
        let (target, arbiter) = (LockedVm::new(case.backing, Vec::new(), false), Arbiter::favours(None));
        let env = (&settings, stage, locked);
        let standby = stand_by(env, &target, &arbiter);
        let primary = protect(env, &source, &standby.address(), (&arbiter, 2)).unwrap();
        hand_over(&primary, &standby, locked);
        assert!(source.is_equal_to(&target), "{}: memory differs", case.name);
    }
    writes.store(false, Ordering::Release);
    writer.join().unwrap();
    true
}

/// The first protection. Returns whether the guest stays.
fn first(env: Env<'_>, case: &Case, source: &Arc<LockedVm>, outside: &Outside) -> bool {
    let locked = env.2;
    let target = LockedVm::new(case.backing, Vec::new(), false);
    let arbiter = Arbiter::favours(match case.end {
        End::Lost => Some("standby"),
        End::Alone => Some("primary"),
        _ => None,
    });
    let standby = stand_by(env, &target, &arbiter);
    let mut to = standby.address();
    if case.end == End::NoStandby {
        let nowhere: Address = "tcp:127.0.0.1:1".parse().unwrap();
        assert!(protect(env, source, &nowhere, (&arbiter, 1)).is_err());
        return true;
    }
    let proxy = (!env.0.is_unix).then(|| {
        let direct = to.clone();
        outside.run(move || Proxy::new(&direct, Box::new(|_, _, _, _| Verdict::Pass)))
    });
    if let Some(proxy) = &proxy {
        to = proxy.address();
    }
    let primary = protect(env, source, &to, (&arbiter, 1)).unwrap();
    locked.on(SOURCE_CALLER, || primary.arm(Arc::new(Patient)).unwrap());
    if matches!(case.end, End::CutInSeeding | End::CancelInSeeding) {
        eventually("pages are sent", || primary.migration().statistics().normal_pages > 64);
    } else {
        wait_for_held(&primary, 5);
    }
    if env.0.copy == CheckpointCopy::CopyOnWrite {
        eventually("a write waits for its copy", || primary.statistics().held_writes > 0);
    }
    let stays = match case.end {
        End::HandOver => {
            hand_over(&primary, &standby, locked);
            assert!(source.is_equal_to(&target), "{}: memory differs", case.name);
            false
        }
        End::Unprotect | End::CancelInSeeding => {
            locked.on(SOURCE_CALLER, || primary.unprotect()).unwrap();
            true
        }
        End::Lost => {
            proxy.as_ref().unwrap().cut();
            assert_eq!(primary.wait(), primary::Outcome::Lost, "{}", case.name);
            assert!(matches!(ended(&standby), standby::Outcome::Running(_)));
            assert!(target.is_running() && !source.is_running());
            false
        }
        End::Alone | End::CutInSeeding => {
            proxy.as_ref().unwrap().cut();
            true
        }
        End::NoStandby => unreachable!(),
    };
    if stays {
        let outcome = primary.wait();
        let is_alone = matches!(outcome, primary::Outcome::Alone(_) | primary::Outcome::Failed(_));
        assert!(is_alone, "{}: {outcome:?}", case.name);
        assert!(matches!(ended(&standby), standby::Outcome::Discarded(_)), "{}", case.name);
    }
    drop((primary, standby));
    if let Some(proxy) = proxy {
        outside.run(move || drop(proxy));
    }
    stays
}

fn hand_over(primary: &Primary, standby: &Standby, locked: &Locked) {
    wait_for_held(primary, 3);
    locked.on(SOURCE_CALLER, || primary.hand_over()).unwrap();
    assert_eq!(primary.wait(), primary::Outcome::HandedOver, "{:?}", primary.state());
    assert!(matches!(ended(standby), standby::Outcome::Running(_)));
}

fn wait_for_held(primary: &Primary, number: u64) {
    eventually("a held checkpoint", || {
        let state = primary.state();
        assert_eq!(state.outcome, None, "{state:?}");
        primary.statistics().held >= number
    });
}

fn ended(standby: &Standby) -> standby::Outcome {
    standby.contact().unwrap().wait(PATIENCE).unwrap()
}

#[test]
fn protections_make_exactly_the_calls_of_the_table() {
    if is_child() {
        let stage = Stage::new();
        let perform =
            |case: &Case, outside: &Outside, locked: &Locked| perform(case, &stage, outside, locked);
        checked::check(&cases(), perform, |call: &Syscall| {
            matches!(call.feature, Feature::Standby | Feature::StandbyCopyOnWrite)
        });
    }
}
