//! A guest is saved while it runs: the image is the state of one moment, and whatever happens the guest runs on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::*;
use crate::support::cause;
use sterna::ram::{Custody, DirtySource, GuestRam};
use sterna::{
    Address, Arrival, Capabilities, ChangeLog, Device, Hook, Incoming, LiveSave, LiveSaveOptions, LiveSaved,
    MigrationError, Outcome, Parameters, RunState, SettingsError, Snapshot, SourceVm, StartError, Status,
    TargetVm, Vm, VmError,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_testing::SmallDisk;
use sterna_transport::{Channel, TransportError};

const LIMIT: Duration = Duration::from_secs(60);

/// A guest that writes all of its memory at full speed.
fn dense() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, fill: Fill::Half(7), rate: 0, ..config() }
}

fn running(config: &ProcessConfig) -> Arc<ProcessGuest> {
    trace();
    let source = ProcessGuest::boot(config.clone()).expect("source");
    source.cont().expect("the guest starts");
    source
}

fn start_with(vm: Arc<dyn SourceVm>, to: &Address, params: Parameters, options: LiveSaveOptions) -> LiveSave {
    LiveSave::start(vm, to, params, Capabilities::default(), options, Arc::new(())).expect("started")
}

fn begin(source: &Arc<ProcessGuest>, to: &Address, params: Parameters) -> LiveSave {
    start_with(Arc::clone(source) as _, to, params, LiveSaveOptions::default())
}

fn ended(save: &LiveSave) -> Result<LiveSaved, MigrationError> {
    save.wait_timeout(LIMIT).expect("the save ends")
}

fn file(path: &Path) -> Address {
    Address::File { path: path.to_owned(), offset: 0 }
}

fn names(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// The guest is free, its memory is not held, and it can be saved again.
fn assert_untouched(source: &Arc<ProcessGuest>, directory: &Path) {
    assert!(Vm::ram(source.as_ref()).custody().may_leave());
    assert_lives_on(source);
    let path = directory.join("again");
    let saved = ended(&begin(source, &file(&path), parameters())).expect("the second attempt");
    assert_eq!(saved.run_state, RunState::Running);
    assert_loads(&path, &dense());
    std::fs::remove_file(path).unwrap();
}

fn assert_loads(path: &Path, config: &ProcessConfig) {
    let target = ProcessGuest::waiting(config.clone()).expect("destination");
    let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
    let incoming =
        Incoming::listen(vm, &file(path), parameters(), Capabilities::default(), Arc::new(())).unwrap();
    let arrival = incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    assert_lives_on(&target);
}

/// Waits until the save has taken the state, and still has pages to send.
fn await_pages(save: &LiveSave) {
    let began = Instant::now();
    while save.statistics().downtime.is_none() || save.statistics().transferred_bytes < 1 << 16 {
        assert!(save.result().is_none() && began.elapsed() < LIMIT, "{:?}", save.result());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn writing_guest_is_saved_many_times_and_never_stays_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&dense());
    for number in 0..4 {
        let path = directory.path().join(format!("image {number}"));
        let save = begin(&source, &file(&path), parameters());
        let saved = ended(&save).expect("saved");
        assert_eq!((save.status(), saved.number), (Status::Completed, None));
        assert_eq!(source.run_state(), RunState::Running);
        assert_eq!((saved.normal_pages + saved.zero_pages) * 4096, 16 << 20);
        assert_lives_on(&source);
        assert_loads(&path, &dense());
    }
    assert_eq!(names(directory.path()), 4, "nothing is left aside");
    assert_untouched(&source, directory.path());
}

#[test]
fn paused_guest_stays_paused_and_so_does_its_copy() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&config());
    source.pause().unwrap();
    let path = directory.path().join("image");
    let saved = ended(&begin(&source, &file(&path), parameters())).expect("saved");
    assert_eq!((saved.run_state, source.run_state()), (RunState::Paused, RunState::Paused));
    source.cont().unwrap();
    assert_lives_on(&source);
}

/// A guest's VM that keeps the memory of the pause, and fails on request.
struct Witness {
    guest: Arc<ProcessGuest>,
    seen: Mutex<Vec<Vec<u8>>>,
    fails_stop: AtomicBool,
    fails_quiesce: AtomicBool,
    holds: AtomicBool,
    panics: AtomicBool,
}

impl Witness {
    fn new(guest: Arc<ProcessGuest>) -> Arc<Self> {
        let [fails_stop, fails_quiesce, panics] = [(); 3].map(|()| AtomicBool::new(false));
        let holds = AtomicBool::new(true);
        Arc::new(Self { guest, seen: Mutex::default(), fails_stop, fails_quiesce, holds, panics })
    }
}

fn content(ram: &GuestRam) -> Vec<Vec<u8>> {
    let of = |block: &sterna::ram::RamBlock| {
        let mut bytes = vec![0; block.len_bytes() as usize];
        block.read(0, &mut bytes).unwrap();
        bytes
    };
    ram.blocks().iter().map(of).collect()
}

impl Vm for Witness {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.guest.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.guest.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for Witness {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        if self.fails_stop.load(Ordering::SeqCst) {
            return Err(VmError::new("stop", "told to fail"));
        }
        self.guest.stop()
    }
    fn quiesce(&self) -> Result<(), VmError> {
        assert!(!self.panics.load(Ordering::SeqCst), "told to panic");
        if self.fails_quiesce.load(Ordering::SeqCst) {
            return Err(VmError::new("quiesce", "told to fail"));
        }
        *self.seen.lock().unwrap() = content(&self.guest.ram());
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.guest.resume()
    }
    fn may_hold_writes(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }
}

/// A VM that waits over TCP, and whose guest will stay paused.
fn waiting(config: &ProcessConfig) -> (Arc<ProcessGuest>, Incoming) {
    let target = ProcessGuest::waiting(config.clone()).expect("destination");
    let incoming = listen(&target, &parameters(), Capabilities::default());
    assert!(incoming.set_autostart(false));
    (target, incoming)
}

#[test]
fn copy_in_another_vm_has_the_memory_of_the_pause_byte_for_byte() {
    // Small copies, so that writers wait for the sending thread.
    for buffer_bytes in [1 << 17, 256 << 20] {
        let (target, incoming) = waiting(&dense());
        let source = running(&dense());
        let witness = Witness::new(Arc::clone(&source));
        let mut options = LiveSaveOptions::default();
        options.buffer_bytes = buffer_bytes;
        let save = start_with(witness.clone(), &incoming.address(), parameters(), options);
        let saved = ended(&save).expect("saved");
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        assert_eq!(target.run_state(), RunState::Paused);

        let (seen, arrived) = (witness.seen.lock().unwrap().clone(), content(&target.ram()));
        for (seen, arrived) in seen.iter().zip(&arrived) {
            let differs = seen.chunks(4096).zip(arrived.chunks(4096)).position(|(one, other)| one != other);
            assert_eq!(differs, None, "the first page with another content");
        }
        assert_lives_on(&source);
        assert_ne!(content(&source.ram()), arrived, "the guest has written since");
        assert!(saved.held_writes > 0, "{saved:?}");
        target.cont().unwrap();
        assert_lives_on(&target);
    }
}

#[test]
fn cancelled_save_leaves_nothing_in_any_phase() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&dense());
    let slow = Parameters { max_bandwidth_bytes: 1 << 20, ..parameters() };
    for is_sending in [false, true] {
        let save = begin(&source, &file(&directory.path().join("image")), slow.clone());
        if is_sending {
            await_pages(&save);
        }
        assert!(save.cancel());
        assert!(matches!(ended(&save), Err(MigrationError::Cancelled)));
        assert_eq!((save.status(), save.cancel()), (Status::Cancelled, false));
        assert_eq!(names(directory.path()), 0);
        assert_untouched(&source, directory.path());
    }
}

#[test]
fn full_disk_fails_with_its_reason_and_the_guest_runs_on() {
    let test = "live_save::full_disk_fails_with_its_reason_and_the_guest_runs_on";
    let aside = tempfile::tempdir().unwrap();
    for size in [4096, 1 << 20] {
        let Some(small) = SmallDisk::mount_for(test, size) else { return };
        let source = running(&dense());
        let error = ended(&begin(&source, &file(&small.path().join("image")), parameters())).unwrap_err();
        assert!(matches!(cause(&error), Some(TransportError::DiskFull { .. })), "{error:?}");
        assert_eq!(names(small.path()), 0);
        assert_untouched(&source, aside.path());
    }
}

/// A connection to a target that the test plays.
fn connected() -> (Address, Channel) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let fd = std::os::fd::OwnedFd::from(theirs);
    (Address::Handed(sterna::HandedFd::new(fd, "the test")), Channel::from_fd(ours.into()).unwrap())
}

#[test]
fn lost_target_fails_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&dense());
    let (to, peer) = connected();
    let save = begin(&source, &to, parameters());
    let mut some = vec![0; 1 << 20];
    peer.read_exact(&mut some).unwrap();
    drop(peer);
    let error = ended(&save).unwrap_err();
    assert!(matches!(error, MigrationError::Transport(_)), "{error:?}");
    assert_eq!(save.status(), Status::Failed);
    assert_untouched(&source, directory.path());
}

#[test]
fn target_that_takes_nothing_holds_the_guest_only_for_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&dense());
    let (to, _silent) = connected();
    let mut options = LiveSaveOptions::default();
    (options.buffer_bytes, options.longest_hold) = (1 << 16, Duration::from_millis(300));
    let params = Parameters { limits: sterna::WaitLimits { stall: LIMIT, ..LIMITS }, ..parameters() };
    let save = start_with(Arc::clone(&source) as _, &to, params, options);
    // The guest writes more than fits the copies, and waits for the target until the limit.
    let error = ended(&save).unwrap_err();
    assert!(matches!(error, MigrationError::HeldTooLong { buffer_bytes: 65536, .. }), "{error:?}");
    assert_untouched(&source, directory.path());
}

#[test]
fn vm_that_fails_or_panics_in_the_pause_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let source = running(&dense());
    for step in 0..3 {
        let witness = Witness::new(Arc::clone(&source));
        [&witness.fails_stop, &witness.fails_quiesce, &witness.panics][step].store(true, Ordering::SeqCst);
        let to = file(&directory.path().join("image"));
        let error = ended(&start_with(witness, &to, parameters(), LiveSaveOptions::default())).unwrap_err();
        assert!(matches!(error, MigrationError::Vm(_) | MigrationError::Panicked { .. }), "{error:?}");
        assert_eq!(names(directory.path()), 0);
        assert_untouched(&source, directory.path());
    }
}

#[test]
fn save_and_migration_exclude_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let source = running(&dense());
    let refusal = |vm: Arc<dyn SourceVm>, capabilities| {
        let options = LiveSaveOptions::default();
        LiveSave::start(vm, &file(&path), parameters(), capabilities, options, Arc::new(()))
            .map(drop)
            .unwrap_err()
    };
    let slow = Parameters { max_bandwidth_bytes: 1 << 20, ..parameters() };
    let target = ProcessGuest::waiting(dense()).unwrap();
    let incoming = listen(&target, &slow, Capabilities::default());
    let migration = start(&source, &incoming.address(), &slow, Capabilities::default(), Arc::new(()));
    let refused = refusal(Arc::clone(&source) as _, Capabilities::default());
    assert!(matches!(refused, StartError::Guest(Custody::Leaving { .. })), "{refused}");
    migration.cancel().unwrap();
    assert!(matches!(migration.wait(), Outcome::Cancelled));

    let save = begin(&source, &file(&path), slow.clone());
    let refused = sterna::Migration::start(
        Arc::clone(&source) as _,
        &"tcp:127.0.0.1:1".parse().unwrap(),
        slow,
        Capabilities::default(),
        Arc::new(()),
    );
    assert!(matches!(refused.map(drop), Err(StartError::Guest(Custody::Leaving { .. }))));
    save.cancel();
    assert!(ended(&save).is_err());

    for (capabilities, what) in [
        (Capabilities { multifd: true, ..Capabilities::default() }, "multifd"),
        (Capabilities { mapped_ram: true, ..Capabilities::default() }, "mapped_ram"),
        (Capabilities { postcopy_ram: true, ..Capabilities::default() }, "postcopy_ram"),
    ] {
        let refused = refusal(Arc::clone(&source) as _, capabilities);
        let expected = StartError::Settings(SettingsError::LiveSaveExcludes { what });
        assert_eq!(refused.to_string(), expected.to_string());
    }
    let witness = Witness::new(Arc::clone(&source));
    witness.holds.store(false, Ordering::SeqCst);
    let refused = refusal(witness, Capabilities::default());
    assert!(matches!(refused, StartError::Settings(SettingsError::CannotHoldWrites)), "{refused}");
    assert_untouched(&source, directory.path());
}

/// Receives a stream into `ram`, and returns the number of its pages.
fn apply(bytes: &[u8], pages: &mut [Vec<u8>], names: &[&str]) -> u64 {
    let (mut at, mut block, mut count) = (0, 0, 0);
    // The pages follow the block list, whose section ends with a footer.
    let start = bytes.windows(4).position(|word| word == b"\x03ram").expect("the section of RAM");
    let list = &bytes[start + 12..];
    let _total = &list[..8];
    let mut head = 8;
    for _ in names {
        head += 1 + list[head] as usize + 8;
    }
    at += start + 12 + head + 8 + 5;
    loop {
        match bytes[at] {
            2 => at += 5,
            _ => return count,
        }
        loop {
            let word = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
            at += 8;
            let (offset, flags) = ((word & !0xfff) as usize, word & 0xfff);
            if flags & 0x10 != 0 {
                break;
            }
            if flags & 0x20 == 0 {
                let length = bytes[at] as usize;
                let name = std::str::from_utf8(&bytes[at + 1..at + 1 + length]).unwrap();
                block = names.iter().position(|known| *known == name).unwrap();
                at += 1 + length;
            }
            let page = &mut pages[block][offset..offset + 4096];
            match flags & 0xa {
                2 => {
                    page.fill(bytes[at]);
                    at += 1;
                }
                8 => {
                    page.copy_from_slice(&bytes[at..at + 4096]);
                    at += 4096;
                }
                other => panic!("flags {other:#x}"),
            }
            count += 1;
        }
        at += 5;
    }
}

#[test]
fn later_saves_hold_only_the_changes_and_together_give_the_state_of_each_pause() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let blocks = ["ram.low", "ram.high"];
    // Each worker writes 64 pages, and waits between them.
    let guest = running(&ProcessConfig { rate: 2000, working_set_pages: Some(64), ..dense() });
    let witness = Witness::new(Arc::clone(&guest));
    let log = ChangeLog::begin(witness.clone()).unwrap();
    let refused = ChangeLog::begin(witness.clone()).map(drop);
    assert!(matches!(refused, Err(StartError::Tracked)), "{refused:?}");
    let mut pages = vec![vec![0; 12 << 20], vec![0; 4 << 20]];
    let mut since = None;
    for number in 1..=5 {
        if number == 4 {
            // A save that fails: the next one has its changes, too.
            let mut options = LiveSaveOptions::default();
            options.changes = Some(Snapshot { log: Arc::clone(&log), since });
            let (to, peer) = connected();
            drop(peer);
            assert!(ended(&start_with(witness.clone(), &to, parameters(), options)).is_err());
        }
        assert!(guest.wait_progress(300, LIMIT));
        let mut options = LiveSaveOptions::default();
        options.changes = Some(Snapshot { log: Arc::clone(&log), since });
        let saved = ended(&start_with(witness.clone(), &file(&path), parameters(), options)).expect("saved");
        let count = apply(&std::fs::read(&path).unwrap(), &mut pages, &blocks);
        std::fs::remove_file(&path).unwrap();
        match since {
            None => assert_eq!(count, 4096),
            Some(_) => assert!((1..=1024).contains(&count), "{count} pages"),
        }
        assert!(*witness.seen.lock().unwrap() == pages, "save {number} differs from the pause");
        since = saved.number;
    }
    assert!(log.knows(since.unwrap()) && !log.knows(1) && !log.knows(99));
    let mut options = LiveSaveOptions::default();
    options.changes = Some(Snapshot { log: Arc::clone(&log), since: Some(1) });
    let error = ended(&start_with(witness.clone(), &file(&path), parameters(), options)).unwrap_err();
    assert!(matches!(error, MigrationError::System(..)), "{error}");
    drop(log);
    assert_untouched(&guest, directory.path());
}
