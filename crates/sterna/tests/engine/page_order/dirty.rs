//! A dirty source that breaks a clause of the page order on behalf of the engine. It is placed between the engine and
//! the guest's log, and changes the log as an engine without that clause would.

use std::sync::{Arc, Mutex};

use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, RamError, SyncReport};
use sterna::{Device, Hook, RunState, SourceVm, Vm, VmError};
use sterna_guests::process::ProcessGuest;

/// Pages of a chunk, the unit that a lane claims (`order::geometry`).
const CHUNK_PAGES: u64 = 512;

/// The change to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Log {
    /// No change.
    Sound,
    /// Clause 2: pages are re-armed after they were read.
    RearmedAfterReading,
    /// Clause 3: a complete slice is re-armed, including pages that were not synced.
    RearmedUnsynced,
    /// Clause 4: only the first chunk of a slice is re-armed before lanes read from the slice.
    RearmedInPart,
    /// Clause 6: a report is dropped if its page was in the round that is being sent, although the page was sent
    /// before.
    ReportsDropped,
}

/// A process guest with such a log.
pub struct Faulty {
    guest: Arc<ProcessGuest>,
    log: Log,
    /// Delayed re-arms.
    late: Mutex<Vec<Late>>,
    /// The log's last report.
    reported: Mutex<DirtyBitmaps>,
}

/// Pages of a block that are not re-armed yet.
struct Late {
    block: usize,
    first: u64,
    count: u64,
    synced: PageBitmap,
}

impl Faulty {
    pub fn new(guest: &Arc<ProcessGuest>, log: Log) -> Arc<Self> {
        let reported = Mutex::new(DirtyBitmaps::new(&guest.ram()));
        Arc::new(Self { guest: Arc::clone(guest), log, late: Mutex::default(), reported })
    }

    fn inner(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }

    fn put_off(&self, block: usize, (first, count): (u64, u64), synced: &PageBitmap) {
        let copy = PageBitmap::new(synced.pages());
        let mut at = first;
        while let Some(run) = synced.next_run(at, first + count, u64::MAX) {
            copy.set_range(run.first, run.count);
            at = run.end();
        }
        self.late.lock().unwrap().push(Late { block, first, count, synced: copy });
    }

    fn rearm_late(&self) -> Result<(), DirtyError> {
        for Late { block, first, count, synced } in self.late.lock().unwrap().drain(..) {
            self.inner().rearm(block, first, count, &synced)?;
        }
        Ok(())
    }

    /// Returns the log's report without the pages of the previous report.
    fn drop_reports(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut last = self.reported.lock().unwrap();
        let (mut all, mut kept) = (DirtyBitmaps::new(&self.ram()), DirtyBitmaps::new(&self.ram()));
        let report = self.inner().sync(&mut all)?;
        kept.or_from(&all);
        kept.drop_reported(&last);
        *last = all;
        Ok(SyncReport { newly_dirty: into.or_from(&kept), ..report })
    }
}

impl DirtySource for Faulty {
    fn start(&self) -> Result<(), DirtyError> {
        self.inner().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.inner().stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.rearm_late()?;
        if self.log == Log::ReportsDropped { self.drop_reports(into) } else { self.inner().sync(into) }
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        match self.log {
            Log::Sound | Log::ReportsDropped => self.inner().rearm(block, first, count, synced),
            Log::RearmedAfterReading => {
                self.put_off(block, (first, count), synced);
                Ok(())
            }
            Log::RearmedUnsynced => {
                let whole = PageBitmap::new(synced.pages());
                whole.set_range(first, count);
                self.inner().rearm(block, first, count, &whole)
            }
            Log::RearmedInPart => {
                let now = count.min(CHUNK_PAGES);
                self.put_off(block, (first + now, count - now), synced);
                self.inner().rearm(block, first, now, synced)
            }
        }
    }
    fn initially_set(&self) -> bool {
        self.inner().initially_set()
    }
    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        self.inner().mark_absent(ram, block, first, count, absent)
    }
    fn name(&self) -> &'static str {
        "faulty"
    }
}

impl Vm for Faulty {
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

impl SourceVm for Faulty {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.guest.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.guest.resume()
    }
}
