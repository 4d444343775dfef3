//! Writes of devices to a paused guest's memory: those that still reach the destination, and those that are found.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::common;
use crate::support::{TestVm, small, vm};
use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, SyncReport};
use sterna::{
    Capabilities, Device, Hook, Migration, MigrationError, Outcome, Parameters, RunState, SourceVm, Vm,
    VmError,
};

/// The callback in which a device writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Stop,
    Release,
    Quiesce,
    Save,
}

/// A device that writes one byte of guest memory in one callback, and reports it as dirty.
struct Writer {
    ram: GuestRam,
    at: At,
    has_written: AtomicBool,
}

impl Writer {
    /// Inverts the first byte of the memory's last page.
    fn reach(&self, at: At) -> Result<(), VmError> {
        if at != self.at || self.has_written.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let failed = |error| VmError::new("the device's write", error);
        let block = self.ram.block(self.block());
        let (offset, mut byte) = (block.len_bytes() - PAGE_SIZE as u64, [0]);
        block.read(offset, &mut byte).map_err(failed)?;
        block.write(offset, &[!byte[0]]).map_err(failed)
    }

    fn block(&self) -> usize {
        self.ram.blocks().len() - 1
    }
}

impl Device for Writer {
    fn name(&self) -> String {
        "writer".to_owned()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.reach(At::Save)?;
        Ok(vec![1])
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
}

impl Hook for Writer {
    fn name(&self) -> String {
        "writer".to_owned()
    }
    fn release(&self) -> Result<(), VmError> {
        self.reach(At::Release)
    }
}

/// A paused guest, with the device.
struct Machine {
    inner: Arc<TestVm>,
    writer: Arc<Writer>,
    quiesced: AtomicU32,
}

impl Vm for Machine {
    fn machine_type(&self) -> String {
        self.inner.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.inner.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let writer = Arc::clone(&self.writer) as Arc<dyn Device>;
        self.inner.devices().into_iter().chain([writer]).collect()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.inner.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        vec![Arc::clone(&self.writer) as _]
    }
}

impl SourceVm for Machine {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn run_state(&self) -> RunState {
        self.inner.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.inner.stop()?;
        self.writer.reach(At::Stop)
    }
    fn quiesce(&self) -> Result<(), VmError> {
        self.quiesced.fetch_add(1, Ordering::SeqCst);
        self.writer.reach(At::Quiesce)
    }
    fn resume(&self) -> Result<(), VmError> {
        self.inner.resume()
    }
}

/// The guest's log, and the device's page after its write.
impl DirtySource for Machine {
    fn start(&self) -> Result<(), DirtyError> {
        self.inner.dirty_source().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.inner.dirty_source().stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut report = self.inner.dirty_source().sync(into)?;
        if self.writer.has_written.load(Ordering::SeqCst) {
            let pages = into.block(self.writer.block());
            report.newly_dirty += u64::from(!pages.get(pages.pages() - 1));
            pages.set(pages.pages() - 1);
        }
        Ok(report)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.inner.dirty_source().rearm(block, first, count, synced)
    }
    fn name(&self) -> &'static str {
        "the guest's log and the device's page"
    }
}

/// Migrates a paused guest whose device writes at that moment. Both have the device.
fn migrate(at: At, check_last_sync: bool) -> (Arc<Machine>, Arc<TestVm>, Outcome) {
    let (source, target) = common::pair(&small());
    source.pause().expect("pausing");
    let (inner, target) = (TestVm::new(source), TestVm::new(target));
    let writer = Writer { ram: inner.ram(), at, has_written: AtomicBool::new(false) };
    let machine = Arc::new(Machine { inner, writer: Arc::new(writer), quiesced: AtomicU32::new(0) });
    let theirs = Writer { ram: target.ram(), at, has_written: AtomicBool::new(true) };
    target.guest.add_device(Arc::new(theirs));
    let params = Parameters { check_last_sync, ..common::parameters() };
    let incoming = vm::listen(&target, &params, Capabilities::default());
    let leaving: Arc<dyn SourceVm> = Arc::clone(&machine) as _;
    let to = incoming.address();
    let migration = Migration::start(leaving, &to, params, Capabilities::default(), Arc::new(())).unwrap();
    let outcome = migration.wait();
    if matches!(outcome, Outcome::Completed) {
        incoming.wait();
    }
    (machine, target, outcome)
}

fn last_byte(ram: &GuestRam) -> u8 {
    let (block, mut byte) = (ram.block(ram.blocks().len() - 1), [0]);
    block.read(block.len_bytes() - PAGE_SIZE as u64, &mut byte).unwrap();
    byte[0]
}

#[test]
fn write_of_stop_of_release_and_of_quiesce_reaches_the_destination() {
    for at in [At::Stop, At::Release, At::Quiesce] {
        for is_checked in [false, true] {
            let (source, target, outcome) = migrate(at, is_checked);
            assert!(matches!(outcome, Outcome::Completed), "{at:?}: {outcome:?}");
            assert!(source.writer.has_written.load(Ordering::SeqCst));
            assert_eq!(last_byte(&target.ram()), last_byte(&source.ram()), "{at:?}");
            assert_eq!(source.quiesced.load(Ordering::SeqCst), 1);
        }
    }
}

#[test]
fn write_of_save_is_found_by_the_check_and_the_guest_stays() {
    let (source, _, outcome) = migrate(At::Save, true);
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let MigrationError::ChangedAfterLastSync { block, first_page, pages } = &error else { panic!("{error}") };
    let ram = source.ram();
    let last = ram.block(source.writer.block());
    assert_eq!((block.as_str(), *first_page, *pages), (last.name(), last.pages() - 1, 1));
    assert_eq!(error.fault(), Some(sterna::Fault::Local));
    assert!(source.inner.guest.has_guest());
}

#[test]
fn write_of_save_without_the_check_does_not_reach_the_destination() {
    let (source, target, outcome) = migrate(At::Save, false);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_ne!(last_byte(&target.ram()), last_byte(&source.ram()), "this is what the check is for");
}
