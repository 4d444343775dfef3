//! Measuring a dirty rate: the counted pages, and the exclusion of other tracking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use sterna::dirty_rate::DirtyRateMeasurement;
use sterna::ram::dirty::SoftwareLog;
use sterna::ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, SyncReport,
};
use sterna::{
    Address, Capabilities, Device, Migration, MigrationError, Parameters, RunState, SourceVm, StartError, Vm,
    VmError,
};

/// A log whose guest writes at known times: pages 0 to 4 while tracking begins, pages 3 to 10 immediately before the
/// last sync.
struct Scripted {
    ram: GuestRam,
    log: SoftwareLog,
    looks: AtomicU32,
    initially_set: bool,
    fails: AtomicBool,
    is_started: AtomicBool,
}

impl Scripted {
    fn new(initially_set: bool) -> Arc<Self> {
        let block =
            |name: &str, pages: usize| RamBlock::new(name, (pages * PAGE_SIZE) as u64, Backing::Memfd);
        let ram = GuestRam::new(vec![block("a", 300).unwrap(), block("b", 70).unwrap()]).unwrap();
        ram.block(0).write(0, &vec![7; 20 * PAGE_SIZE]).unwrap();
        let log = SoftwareLog::new(&ram);
        let (looks, fails, is_started) = (AtomicU32::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { ram, log, looks, initially_set, fails, is_started })
    }
}

impl DirtySource for Scripted {
    fn start(&self) -> Result<(), DirtyError> {
        self.log.start()?;
        self.is_started.store(true, Ordering::SeqCst);
        if self.initially_set {
            self.log.mark_range(0, 0, 300);
            self.log.mark_range(1, 0, 70);
        } else {
            self.log.mark_range(0, 0, 5);
        }
        Ok(())
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.is_started.store(false, Ordering::SeqCst);
        self.log.stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(DirtyError::NotStarted { origin: "scripted" });
        }
        let first_look = !self.initially_set && self.looks.fetch_add(1, Ordering::SeqCst) == 0;
        if !first_look {
            self.log.mark_range(0, 3, 8);
            self.log.mark(0, 5);
            self.log.mark(1, 69);
        }
        self.log.sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.log.rearm(block, first, count, synced)
    }
    fn initially_set(&self) -> bool {
        self.initially_set
    }
    fn name(&self) -> &'static str {
        "scripted"
    }
}

impl Vm for Scripted {
    fn machine_type(&self) -> String {
        "scripted".into()
    }
    fn ram(&self) -> GuestRam {
        self.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
}

impl SourceVm for Scripted {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn run_state(&self) -> RunState {
        RunState::Running
    }
    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        Ok(())
    }
}

/// Longer than any test lasts.
const FOREVER: Duration = Duration::from_secs(3600);

#[test]
fn measurement_counts_distinct_pages_written_after_all_were_armed() {
    for initially_set in [false, true] {
        let vm = Scripted::new(initially_set);

        let reading =
            DirtyRateMeasurement::start(vm.clone(), Duration::from_millis(20)).unwrap().wait().unwrap();

        // Eight pages and one page. Pages written during the start, and pages written twice, do not count again.
        assert_eq!(reading.dirty_pages, 9, "initially set: {initially_set}");
        assert_eq!(reading.dirty_bytes(), 9 * PAGE_SIZE as u64);
        assert_eq!(reading.touched_pages, 20);
        assert!(reading.interval >= Duration::from_millis(19) && reading.bytes_per_second() > 0.0);
        assert!(!vm.is_started.load(Ordering::SeqCst), "tracking has ended");
    }
}

#[test]
fn measurement_excludes_a_migration_and_another_measurement_until_it_ends() {
    let vm = Scripted::new(false);
    let measurement = DirtyRateMeasurement::start(vm.clone(), FOREVER).unwrap();

    let migrate = || {
        let to: Address = "tcp:127.0.0.1:1".parse().unwrap();
        Migration::start(vm.clone(), &to, Parameters::default(), Capabilities::default(), Arc::new(()))
    };
    assert!(matches!(migrate(), Err(StartError::Tracked)));
    let second = DirtyRateMeasurement::start(vm.clone(), FOREVER);
    assert!(matches!(second, Err(StartError::Tracked)));
    measurement.cancel();

    assert!(matches!(measurement.wait(), Err(MigrationError::Cancelled)));
    assert!(!measurement.is_running() && !vm.is_started.load(Ordering::SeqCst));
    assert!(vm.ram.claim_tracking().is_some());
}

#[test]
fn measurement_that_fails_says_why_and_stops_tracking() {
    let vm = Scripted::new(false);
    vm.fails.store(true, Ordering::SeqCst);

    let failed = DirtyRateMeasurement::start(vm.clone(), FOREVER).unwrap().wait();

    assert!(matches!(failed, Err(MigrationError::Dirty(_))), "{failed:?}");
    assert!(!vm.is_started.load(Ordering::SeqCst));
    assert!(vm.ram.claim_tracking().is_some());
}

#[test]
fn measurement_whose_handle_goes_ends_by_itself() {
    let vm = Scripted::new(false);
    drop(DirtyRateMeasurement::start(vm.clone(), FOREVER).unwrap());

    // The measurement's thread drops its claim soon, not after an hour.
    while vm.ram.claim_tracking().is_none() {
        std::thread::yield_now();
    }
}
