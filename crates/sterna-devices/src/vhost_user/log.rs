//! What back ends write, as a dirty source.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::dirty::{DirtyBitmaps, DirtySource, SyncReport, VhostLog};
use sterna_ram::{DirtyError, PageBitmap};

use super::device::VhostUserDevice;
use super::error::VhostUserError;

const NAME: &str = "vhost-user";

/// A [`VhostLog`] and the devices whose back ends fill it: they note what they write from the start of tracking to
/// its end. Put it beside the source for vCPUs' writes in a [`sterna_ram::dirty::Combined`].
#[derive(Debug)]
pub struct VhostUserLog {
    log: Arc<VhostLog>,
    devices: Vec<Arc<VhostUserDevice>>,
    /// Those whose back ends were told; also keeps starting and stopping apart.
    told: Mutex<usize>,
}

impl VhostUserLog {
    /// Not started. `log` must be over the RAM, and the ranges of it, that the devices were given.
    pub fn new(log: Arc<VhostLog>, devices: Vec<Arc<VhostUserDevice>>) -> Self {
        Self { log, devices, told: Mutex::new(0) }
    }

    /// Goes on after a failure; gives the first.
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
            // Also if it fails: a back end that did not answer in time may do what it was told all the same.
            *told = index + 1;
            if let Err(error) = device.start_log(&self.log) {
                // The error that matters is the first one.
                let _ = self.untell(&mut told);
                return Err(failed("starting its log", index, error));
            }
        }
        Ok(())
    }

    /// A back end that is gone cannot be told; that is an error, but it writes nothing either.
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
