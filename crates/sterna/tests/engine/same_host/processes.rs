//! The destination is another process, which ends at a chosen moment.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use sterna::error::{Difference, MemoryDifference, MigrationError};
use sterna::ram::{Custody, GuestRam, PAGE_SIZE};
use sterna::{
    Arrival, Capabilities, Decision, Device, Hook, Incoming, Migration, Outcome, Parameters, Status,
    TargetVm, Vm, VmError,
};

use super::{Place, contents, inodes, parameters};
use crate::common;
use crate::support::{self, TestVm, small, until_status, vm, vms};
use sterna_guests::process::ProcessGuest;

const PATH: &str = "STERNA_TEST_SAME_HOST_PATH";
const MOMENT: &str = "STERNA_TEST_SAME_HOST_MOMENT";

/// A destination that ends its process, or that writes memory without the engine's knowledge.
struct Dying {
    vm: Arc<TestVm>,
    moment: String,
}

fn die() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

impl Vm for Dying {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.vm.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let reckless = Arc::new(Reckless { ram: self.vm.ram(), writes: self.moment == "write" });
        self.vm.devices().into_iter().chain([reckless as Arc<dyn Device>]).collect()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.vm.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        vec![Arc::new(DyingHook(self.moment == "prepare"))]
    }
}

impl TargetVm for Dying {
    fn start(&self) -> Result<(), VmError> {
        if self.moment == "start" {
            die();
        }
        self.vm.start()
    }
    fn reset(&self) {
        self.vm.reset();
    }
}

struct DyingHook(bool);

impl Hook for DyingHook {
    fn name(&self) -> String {
        "moment".to_owned()
    }
    fn acquire(&self) -> Result<(), VmError> {
        if self.0 { die() } else { Ok(()) }
    }
    fn seize(&self) -> Result<(), VmError> {
        Ok(())
    }
}

/// A device that knows where memory is mapped, and accesses it directly.
struct Reckless {
    ram: GuestRam,
    writes: bool,
}

impl Device for Reckless {
    fn name(&self) -> String {
        "reckless".to_owned()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(vec![1])
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        if self.writes {
            // Like a device that has the address: the processor raises a fault, which ends this process.
            let page = self.ram.block(0).slice(0, PAGE_SIZE).expect("a window");
            let _ = page.copy_from(&[0xff; PAGE_SIZE]);
        }
        Ok(())
    }
}

/// Started by the other tests.
#[test]
#[ignore = "a part of other tests"]
fn destination_process() {
    let (Some(path), Some(moment)) = (std::env::var_os(PATH), std::env::var_os(MOMENT)) else { return };
    let vm = TestVm::new(ProcessGuest::waiting(small()).unwrap());
    let moment = moment.to_string_lossy().into_owned();
    let dying = Arc::new(Dying { vm: Arc::clone(&vm), moment });
    let address = sterna::Address::Unix(path.clone().into());
    let params = Parameters { limits: support::short_limits(), ..common::parameters() };
    let incoming =
        Incoming::listen(dying, &address, params, Capabilities::default(), Arc::new(())).expect("listening");
    std::fs::write(ready(Path::new(&path)), "").unwrap();
    match incoming.wait() {
        Arrival::Completed(_) => common::assert_lives_on(&vm.guest),
        other => panic!("{other:?}"),
    }
}

/// Starts a destination in its own process, which waits at `place`.
fn spawn(place: &Place, moment: &str, uid: Option<u32>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "same_host::processes::destination_process"])
        .env(PATH, &place.path)
        .env(MOMENT, moment)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let child = command.spawn().unwrap();
    // The socket's file exists a moment before the process listens.
    support::eventually("the destination's socket", || ready(&place.path).exists());
    child
}

/// The file that a destination creates when it listens at `path`.
fn ready(path: &Path) -> PathBuf {
    path.with_extension("ready")
}

struct Source {
    vm: Arc<TestVm>,
    memory: Vec<u64>,
}

impl Source {
    /// A machine with the same device as the destination's.
    fn new() -> Self {
        let (vm, _) = vms();
        vm.guest.add_device(Arc::new(Reckless { ram: vm.ram(), writes: false }));
        Self { memory: inodes(&vm.ram()), vm }
    }

    fn migrate(&self, place: &Place) -> Migration {
        let params = Parameters { limits: support::short_limits(), ..parameters() };
        vm::start(&self.vm, &place.address(), &params, Capabilities::default(), Arc::new(()))
    }

    fn assert_goes_on(&self) {
        assert_eq!(inodes(&self.vm.ram()), self.memory);
        common::assert_lives_on(&self.vm.guest);
    }
}

#[test]
fn guest_moves_to_another_process() {
    let (source, place) = (Source::new(), Place::new());
    let mut child = spawn(&place, "never", None);
    let migration = source.migrate(&place);

    assert!(matches!(migration.wait(), Outcome::Completed));
    assert!(child.wait().unwrap().success(), "the guest is not whole in the other process");
    assert_eq!(source.vm.ram().custody(), Custody::Gone);
    assert!(inodes(&source.vm.ram()).iter().all(|inode| !source.memory.contains(inode)));
}

#[test]
fn destination_killed_before_the_commit_leaves_every_byte() {
    for moment in ["prepare", "write"] {
        let (source, place) = (Source::new(), Place::new());
        source.vm.guest.pause().unwrap();
        let before = contents(&source.vm.ram());
        let mut child = spawn(&place, moment, None);
        let migration = source.migrate(&place);

        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{moment}: {outcome:?}");
        assert!(!child.wait().unwrap().success());
        assert!(contents(&source.vm.ram()) == before, "{moment}: bytes of the guest have changed");
        source.vm.guest.cont().unwrap();
        source.assert_goes_on();
    }
}

/// The source does not know whether the guest ran there. It stays stopped and keeps the memory, until an operator
/// decides.
#[test]
fn destination_killed_after_the_commit_leaves_the_source_undecided_and_its_memory_whole() {
    let (source, place) = (Source::new(), Place::new());
    let mut child = spawn(&place, "start", None);
    let migration = source.migrate(&place);
    until_status(&migration, Status::Undecided);
    child.wait().unwrap();
    assert!(!source.vm.ram().custody().may_run());
    assert_eq!(inodes(&source.vm.ram()), source.memory, "it may be needed yet");

    migration.decide(Decision::SourceRuns).unwrap();

    assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
    source.assert_goes_on();
}

/// Only root can start a process of another user.
#[test]
fn process_of_another_user_gets_no_descriptor() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can start a process of another user");
        return;
    }
    const NOBODY: u32 = 65_534;
    let open = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let (source, place) = (Source::new(), Place::new());
    open(place.path.parent().unwrap());
    let mut child = spawn(&place, "never", Some(NOBODY));
    let migration = source.migrate(&place);

    let Outcome::Failed { error, held: false } = migration.wait() else { panic!() };
    let MigrationError::PeerIncompatible(Difference::Memory(why)) = &error else { panic!("{error}") };
    assert!(matches!(why, MemoryDifference::OtherUser { theirs: NOBODY, .. }), "{error}");
    assert!(!child.wait().unwrap().success());
    source.assert_goes_on();
}
