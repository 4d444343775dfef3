//! The inboxes of all devices.

use std::sync::Arc;

use sterna_wire::return_path::ReturnMessage;

use super::inbox::Inbox;
use crate::error::MigrationError;
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};

/// The inboxes of all devices with a stream.
pub(in crate::incoming) struct Inboxes {
    boxes: Vec<Arc<Inbox>>,
}

impl Inboxes {
    pub(crate) fn new(devices: Vec<Streamed>, limit: u64) -> Self {
        Self { boxes: devices.into_iter().map(|device| Arc::new(Inbox::new(device, limit))).collect() }
    }

    /// Where chunks of a device go.
    ///
    /// # Errors
    /// There is no such device here, or it has no stream.
    pub(crate) fn find(&self, name: &str, instance: u32) -> Result<&Arc<Inbox>, MigrationError> {
        let found =
            self.boxes.iter().find(|inbox| inbox.device.name == name && inbox.device.instance == instance);
        found.ok_or_else(|| MigrationError::PeerIncompatible {
            what: format!(
                "a chunk of the state of device {name:?}, instance {instance}: no device here accepts it in that way; \
                 give both machines the same devices"
            ),
        })
    }

    pub(crate) fn all(&self) -> Vec<Arc<Inbox>> {
        self.boxes.clone()
    }

    /// The source keeps to grants: gives the first to every device.
    pub(crate) fn begin_credit(
        &self,
        mut say: impl FnMut(&ReturnMessage) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| {
            let bytes = inbox.begin_credit();
            say(&grant(&inbox.device, bytes))
        })
    }

    /// All chunks must have come by now.
    pub(crate) fn all_came(&self) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| inbox.all_came())
    }

    pub(crate) fn are_loaded(&self) -> bool {
        self.boxes.iter().all(|inbox| inbox.is_loaded())
    }

    /// Bytes that came and that were loaded: whether anything moves.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let progress = self.boxes.iter().map(|inbox| inbox.progress());
        progress.fold((0, 0), |(came, loaded), one| (came + one.0, loaded + one.1))
    }

    /// Names a device that is not loaded yet.
    pub(crate) fn unloaded(&self) -> String {
        let late = self.boxes.iter().find(|inbox| !inbox.is_loaded());
        late.map_or_else(String::new, |inbox| format!("the stream of {} to be loaded", inbox.device))
    }

    pub(crate) fn statistics(&self) -> Vec<StreamStatistics> {
        self.boxes.iter().map(|inbox| inbox.statistics()).collect()
    }

    pub(crate) fn stop(&self) {
        self.boxes.iter().for_each(|inbox| inbox.stop());
    }

    /// The connection is lost: every stream goes on behind what was loaded. No load thread works now.
    pub(crate) fn suspend(&self) {
        self.boxes.iter().for_each(|inbox| inbox.suspend());
    }

    /// The source begins every stream anew.
    ///
    /// # Errors
    /// All stops before what was loaded is forgotten.
    pub(crate) fn begin_anew(&self) -> Result<(), MigrationError> {
        match self.boxes.iter().all(|inbox| inbox.begin_anew()) {
            true => Ok(()),
            false => Err(MigrationError::Cancelled),
        }
    }

    /// Everything comes anew. No load thread works now.
    pub(crate) fn restart(&self) {
        self.boxes.iter().for_each(|inbox| inbox.restart());
    }

    /// The devices run, before the vCPUs do.
    pub(crate) fn run_devices(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// As [`Inboxes::run_devices`], as far as that goes: what went wrong is returned.
    pub(crate) fn run_devices_that_can(&self) -> Vec<MigrationError> {
        failed_in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// The guest could not be started: devices that run already stop. What went wrong is returned.
    pub(crate) fn stop_devices(&self) -> Vec<MigrationError> {
        let devices = self.devices();
        let mut failed = failed_in_parallel(&devices, "quiesce", |device| device.quiesce());
        failed.extend(failed_in_parallel(&devices, "stop", |device| device.stop()));
        failed
    }

    /// Forgets what was loaded.
    pub(crate) fn end_load(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "forget what was loaded", |device| device.end_load())
    }

    fn devices(&self) -> Vec<Streamed> {
        self.boxes.iter().map(|inbox| inbox.device.clone()).collect()
    }
}

/// What tells the source that a device has room for so many bytes more.
pub(super) fn grant(device: &Streamed, bytes: u64) -> ReturnMessage {
    ReturnMessage::Grant { device: device.name.clone(), instance: device.instance, bytes }
}
