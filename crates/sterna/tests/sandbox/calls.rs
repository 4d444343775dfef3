//! The system calls of each feature.
#![allow(clippy::print_stderr, reason = "names the case of a failure")]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use sterna::ram::dirty::{Combined, KvmDirtyLog, KvmDirtyRings, KvmSlot, UffdDirtyLog};
use sterna::ram::{Backing, DirtySource, GuestRam};
use sterna::sandbox::{self, Argument, Feature, Syscall, TABLE, Thread};
use sterna::{
    Address, Arrival, Compression, Direct, Incoming, MigrationMode, OnThreadStart, Outcome, SharedSettings,
    Status, TargetVm, ThreadRole,
};

use crate::child::{is_child, skipped};
use crate::common::Log as Observed;
use crate::recorder::{MARK, Record, STARTING, mark, recorded};
use crate::scenes::{Place, Scene, Sides, Stage, address, cut_rdma, listen, rdma_address, start};
use crate::support::pairs::banks;
use crate::support::proxy::{Proxy, Verdict};
use crate::support::{eventually, until_status};
use crate::vm::{LockedVm, PAGES};

/// Role numbers of the recorder: the index of the engine's role, or one of these.
const SOURCE_CALLER: u32 = 500;
const DESTINATION_CALLER: u32 = 501;
/// The test itself.
const DRIVER: u32 = 999;

/// Every thread of the engine, and the threads that start the sides, have exactly the rules of the table.
pub struct Locked {
    programs: Arc<Programs>,
    /// Whether the destination may not make a userfaultfd by itself.
    lacks_userfaultfd: bool,
}

/// Filters by the number of the role. Without filters the calls are only recorded.
type Programs = BTreeMap<u32, BpfProgram>;

impl Locked {
    fn new(case: &Case, is_strict: bool) -> Self {
        let features = case.features();
        let threads = (0..).zip(ThreadRole::ALL).map(|(index, role)| (index, Thread::Engine(*role)));
        let callers =
            [(SOURCE_CALLER, Thread::SourceCaller), (DESTINATION_CALLER, Thread::DestinationCaller)];
        let all = threads.chain(callers).filter(|_| is_strict);
        let programs = all.map(|(number, thread)| (number, program(&features, thread))).collect();
        Self { programs: Arc::new(programs), lacks_userfaultfd: case.by_device }
    }

    fn on<T: Send>(&self, role: u32, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let caller = scope.spawn(move || {
                mark(DRIVER);
                if role == DESTINATION_CALLER && self.lacks_userfaultfd {
                    drop_ptrace();
                }
                enter(role, &self.programs);
                let done = act();
                mark(DRIVER);
                done
            });
            caller.join().unwrap()
        })
    }
}

/// Locks the calling thread in.
fn enter(role: u32, programs: &Programs) {
    mark(role);
    if let Some(program) = programs.get(&role) {
        seccompiler::apply_filter(program).unwrap();
    }
}

/// The filter of a thread: the rules of the table, and the test's own mark.
fn program(features: &[Feature], thread: Thread) -> BpfProgram {
    let condition = |index, operator, value: u32| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, u64::from(value)).unwrap()
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut whole = Vec::new();
    for call in sandbox::rules(features, thread) {
        let condition = match call.argument {
            Argument::Is { index, value, .. } => condition(index, SeccompCmpOp::Eq, value),
            Argument::Lacks { index, bits, .. } => {
                condition(index, SeccompCmpOp::MaskedEq(u64::from(bits)), 0)
            }
            _ => {
                whole.push(call.number);
                continue;
            }
        };
        rules.entry(call.number).or_default().push(SeccompRule::new(vec![condition]).unwrap());
    }
    let mark = condition(0, SeccompCmpOp::Eq, MARK as u32);
    rules.entry(libc::SYS_prctl).or_default().push(SeccompRule::new(vec![mark]).unwrap());
    whole.into_iter().for_each(|number| drop(rules.insert(number, Vec::new())));
    let (mismatch, matching) = (SeccompAction::Trap, SeccompAction::Allow);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    SeccompFilter::new(rules, mismatch, matching, arch).unwrap().try_into().unwrap()
}

/// Takes CAP_SYS_PTRACE from this thread and the threads that it starts.
fn drop_ptrace() {
    const SYS_PTRACE: u32 = 1 << 19;
    let header = [0x2008_0522u32, 0];
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: both structures of version 3 have these words, and are live.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0][0] &= !SYS_PTRACE;
        sets[0][1] &= !SYS_PTRACE;
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

impl Sides for Locked {
    fn at_source<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.on(SOURCE_CALLER, act)
    }
    fn at_destination<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        self.on(DESTINATION_CALLER, act)
    }
    fn hooks(&self) -> [Option<OnThreadStart>; 2] {
        let programs = Arc::clone(&self.programs);
        let hook = move |role: ThreadRole| {
            let index = ThreadRole::ALL.iter().position(|one| *one == role).unwrap();
            enter(index as u32, &programs);
        };
        let hook: OnThreadStart = Arc::new(hook);
        [Some(Arc::clone(&hook)), Some(hook)]
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Runs closures on a thread that was started before the filter.
struct Outside(Sender<Job>);

impl Outside {
    fn new() -> Self {
        let (jobs, todo): (Sender<Job>, Receiver<Job>) = channel();
        std::thread::spawn(move || todo.into_iter().for_each(|job| job()));
        Self(jobs)
    }

    fn run<T: Send + 'static>(&self, act: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = channel();
        self.0.send(Box::new(move || done.send(act()).unwrap())).unwrap();
        result.recv().unwrap()
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

/// The dirty source of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Log {
    Software,
    Userfaultfd,
    Kvm,
    KvmRing,
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
            (self.by_device, Feature::PostcopyByDevice),
            (scene.params.mode == MigrationMode::CprTransfer, Feature::SameHost),
            (self.log == Log::Kvm, Feature::KvmDirtyLog),
            (self.log == Log::KvmRing, Feature::KvmDirtyRing),
            (self.log == Log::Userfaultfd, Feature::UffdDirtyLog),
        ];
        all.into_iter().filter_map(|(is_used, feature)| is_used.then_some(feature)).collect()
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
        Case { log: Log::Userfaultfd, ..plain(Scene::new("userfaultfd", Place::Tcp)) },
        Case { log: Log::Userfaultfd, ..plain(Scene::new("userfaultfd-anonymous", Place::Tcp).anonymous()) },
        Case { log: Log::Kvm, ..plain(Scene::new("kvm", Place::Tcp)) },
        Case { log: Log::KvmRing, ..plain(Scene::new("kvm-ring", Place::Tcp)) },
    ]);
    cases
}

/// A VM of KVM's without vCPUs, whose only slot is the block.
fn kvm_vm(ram: &GuestRam) -> Option<(OwnedFd, KvmSlot)> {
    const KVM_CREATE_VM: libc::c_ulong = 0xae01;
    const KVM_SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm").ok()?;
    // SAFETY: no pointers are passed, and the descriptor is new.
    let vm = unsafe {
        let vm = libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0);
        (vm >= 0).then(|| OwnedFd::from_raw_fd(vm))?
    };
    let block = ram.block(0);
    let region = [0u64, 0, block.len_bytes(), block.host_address() as u64];
    // SAFETY: slot 0 without flags at address 0: the structure has these four words, and the memory outlives the VM.
    let set = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, region.as_ptr()) };
    assert_eq!(set, 0);
    let slot = KvmSlot { slot: 0, flags: 0, guest_address: 0, block: 0, first_page: 0, pages: block.pages() };
    Some((vm, slot))
}

/// The dirty source of a case, beside the software log that has the test's writes. `None`: this host has none.
fn dirty_source(log: Log, vm: &LockedVm) -> Option<Arc<dyn DirtySource>> {
    let (ram, software) = (&vm.ram, Arc::clone(&vm.log) as Arc<dyn DirtySource>);
    let also: Arc<dyn DirtySource> = match log {
        Log::Software => return Some(software),
        Log::Userfaultfd if !UffdDirtyLog::is_supported() => return None,
        Log::Userfaultfd => Arc::new(UffdDirtyLog::new(ram.clone())),
        Log::Kvm => {
            let (vm, slot) = kvm_vm(ram)?;
            Arc::new(KvmDirtyLog::new(vm, vec![slot], ram.clone()).unwrap())
        }
        Log::KvmRing => {
            let (vm, slot) = kvm_vm(ram)?;
            Arc::new(KvmDirtyRings::enable(vm, 1024).ok()?.source(&[], vec![slot], ram.clone()).unwrap())
        }
    };
    Some(Arc::new(Combined::new(vec![software, also])))
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
fn no_listener(place: Place) -> Address {
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
    locked.at_destination(|| {
        let (on, shared) = (scene.capabilities, SharedSettings::AsHere);
        Incoming::listen_with(at, params, on, shared, log.clone(), make).unwrap()
    })
}

/// Writes pages as a guest does, until the test ends it or the engine stops the guest.
fn write_until(source: &LockedVm, writes: &AtomicBool) {
    for page in (1..PAGES).step_by(64).cycle() {
        if !writes.load(Ordering::Acquire) || !source.write_if_running(page, 3) {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The thread of a record; `None` while a thread of the engine starts.
fn thread_of(role: u32) -> Option<Thread> {
    match role {
        SOURCE_CALLER => Some(Thread::SourceCaller),
        DESTINATION_CALLER => Some(Thread::DestinationCaller),
        STARTING => None,
        index => Some(Thread::Engine(ThreadRole::ALL[index as usize])),
    }
}

/// The lines of the table that allow a thread's own call.
fn lines_for(record: &Record, features: &[Feature]) -> Vec<usize> {
    let is_used =
        |feature| matches!(feature, Feature::Runtime | Feature::Always) || features.contains(&feature);
    let thread = thread_of(record.role);
    let allows = |call: &Syscall| {
        let is_made = thread.map_or(call.threads.is_empty(), |thread| call.is_made_by(thread));
        let is_allowed = call.number == record.number && call.argument.allows(&record.arguments);
        is_used(call.feature) && is_made && is_allowed
    };
    TABLE.iter().enumerate().filter(|(_, call)| allows(call)).map(|(index, _)| index).collect()
}

fn shown(record: &Record) -> String {
    let name = TABLE.iter().find(|call| call.number == record.number).map_or("unknown", |call| call.name);
    let path = if record.number == libc::SYS_openat { record.path() } else { String::new() };
    let at = thread_of(record.role).map_or("a starting thread".to_owned(), |thread| format!("{thread:?}"));
    format!("{at}: {name} ({}) {:x?} {path}", record.number, &record.arguments[..3])
}

/// Whether a line may be unused in a run, because its call depends on timing or on more than this host has.
fn is_rare(call: &Syscall) -> bool {
    match call.argument {
        // Dirty rings are only reset if a vCPU has written. The tests of the reference machine run one.
        Argument::Is { name, .. } => name == "KVM_RESET_DIRTY_RINGS",
        // Versions of the C library differ in the call of `stat(2)`.
        _ if ["fstat", "newfstatat"].contains(&call.name) => true,
        // Threads wait for a lock, the process is stopped during a wait, or the allocator changes the heap or counts processors.
        _ => {
            let rare =
                ["brk", "clock_nanosleep", "mremap", "openat", "read", "restart_syscall", "sched_yield"];
            call.feature == Feature::Runtime && rare.contains(&call.name)
        }
    }
}

/// Writes all calls for the one who maintains the table: scene, thread, number, arguments, path, count.
fn dump(to: &std::ffi::OsStr, scene: &str, records: &[Record]) {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for record in records {
        let [_, at1, at2] = [0, 1, 2].map(|index| record.arguments[index]);
        let path = if record.number == libc::SYS_openat { record.path() } else { String::new() };
        let (role, first) = (record.role, record.arguments[0] as u32);
        let thread = thread_of(role).map_or("starting".to_owned(), |thread| format!("{thread:?}"));
        let line =
            format!("{scene}\t{thread}\t{}\t{first}\t{}\t{}\t{path}", record.number, at1 as u32, at2 as u32);
        *seen.entry(line).or_default() += 1;
    }
    let text: String = seen.into_iter().map(|(line, count)| format!("{line}\t{count}\n")).collect();
    let mut file = std::fs::File::options().create(true).append(true).open(to).unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
}

/// Runs cases under their filters. A call outside of the table ends the child with the call's name. A line of `checked`
/// that no case needs fails the test: without that line, the case that needs it would fail.
pub fn check(cases: Vec<Case>, checked: impl Fn(&Syscall) -> bool) {
    // STERNA_RECORD_CALLS=FILE: without filters, to learn of all new calls in one run.
    let record_to = std::env::var_os("STERNA_RECORD_CALLS");
    let (stage, outside) = (Stage::new(), Outside::new());
    let mut needed = BTreeSet::new();
    let mut missing = BTreeSet::new();
    for case in cases {
        let locked = Locked::new(&case, record_to.is_none());
        let features = case.features();
        // The last line names the case of a call that is refused.
        eprintln!("case {}", case.scene.name);
        let (is_run, records) = recorded(|| perform(&case, &stage, &outside, &locked));
        if !is_run {
            skipped(case.scene.name, "this host lacks what it needs; its lines are not checked");
            needed.extend((0..TABLE.len()).filter(|index| features.contains(&TABLE[*index].feature)));
            continue;
        }
        let records: Vec<Record> = records.into_iter().filter(|record| record.role != DRIVER).collect();
        if let Some(to) = &record_to {
            dump(to, case.scene.name, &records);
        }
        let looks_up = |record: &&Record| {
            thread_of(record.role) == Some(Thread::Engine(ThreadRole::Resolve))
                || record.path().starts_with("/etc/")
        };
        let lookup = records.iter().find(looks_up).map(shown);
        assert!(lookup.is_none(), "{}: a number is looked up: {lookup:?}", case.scene.name);
        for record in &records {
            match lines_for(record, &features)[..] {
                [] => drop(missing.insert(format!("{}: {}", case.scene.name, shown(record)))),
                [only] => drop(needed.insert(only)),
                _ => {}
            }
        }
    }
    assert!(missing.is_empty(), "not in the table: {missing:#?}");
    let unused = (0..TABLE.len()).filter(|index| !needed.contains(index)).map(|index| TABLE[index]);
    let unused: Vec<_> = unused.filter(|call| checked(call) && !is_rare(call)).collect();
    assert!(unused.is_empty(), "no case needs these lines: {unused:#?}");
}

#[test]
fn every_feature_makes_exactly_the_calls_of_the_table() {
    if is_child() {
        // The lab runs the cases of RDMA and of huge pages.
        check(cases(), |call| !matches!(call.feature, Feature::Rdma | Feature::HugePages));
    }
}
