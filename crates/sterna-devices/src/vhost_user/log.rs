//! The dirty source for the writes of vhost-user back ends.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::dirty::{DirtyBitmaps, DirtySource, SyncReport, VhostLog};
use sterna_ram::{DirtyError, PageBitmap};

use super::device::VhostUserDevice;
use super::error::VhostUserError;

const NAME: &str = "vhost-user";

/// The dirty source of devices whose back ends record their writes in a [`VhostLog`]. They record while
/// tracking is active. Combine it with the source for vCPUs' writes in a [`sterna_ram::dirty::Combined`].
#[derive(Debug)]
pub struct VhostUserLog {
    log: Arc<VhostLog>,
    devices: Vec<Arc<VhostUserDevice>>,
    /// Number of devices whose back ends were asked to record. The lock also serialises start and stop.
    told: Mutex<usize>,
}

impl VhostUserLog {
    /// An inactive log. `log` must cover the same ranges of RAM as the devices.
    pub fn new(log: Arc<VhostLog>, devices: Vec<Arc<VhostUserDevice>>) -> Self {
        Self { log, devices, told: Mutex::new(0) }
    }

    /// Stops recording in all devices, even after a failure. Returns the first error.
    fn untell(&self, told: &mut usize) -> Result<(), DirtyError> {
        let mut result = Ok(());
        for index in (0..std::mem::take(told)).rev() {
            let stopped =
                self.devices[index].stop_log().map_err(|error| failed("stopping its log", index, error));
            result = result.and(stopped);
        }
        result.and(self.log.stop())
    }
}

impl DirtySource for VhostUserLog {
    fn start(&self) -> Result<(), DirtyError> {
        let mut told = self.told.lock();
        if self.log.is_active() {
            return Ok(());
        }
        self.log.start()?;
        for (index, device) in self.devices.iter().enumerate() {
            // Counted before the call: a back end that did not answer in time may record nevertheless.
            *told = index + 1;
            if let Err(error) = device.start_log(&self.log) {
                // Only the first error is returned.
                let _ = self.untell(&mut told);
                return Err(failed("starting its log", index, error));
            }
        }
        Ok(())
    }

    /// A back end that has ended cannot be stopped. That is an error, although it does not write any more.
    fn stop(&self) -> Result<(), DirtyError> {
        let mut told = self.told.lock();
        if !self.log.is_active() {
            return Ok(());
        }
        self.untell(&mut told)
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut report = self.log.sync(into)?;
        report.newly_dirty += self.devices.iter().map(|device| device.sync_used_rings(into)).sum::<u64>();
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.log.rearm(block, first, count, synced)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

fn failed(call: &'static str, index: usize, error: VhostUserError) -> DirtyError {
    let source = io::Error::other(error);
    DirtyError::System { origin: NAME, call, what: "device", index: index as u64, source }
}
