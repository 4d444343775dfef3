//! Access to the inboxes of all devices that have a stream.

use std::sync::Arc;

use sterna_wire::return_path::ReturnMessage;

use super::inbox::Inbox;
use crate::error::{Awaited, MachineDifference, MigrationError};
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};

/// One inbox per device with a stream.
pub(in crate::incoming) struct Inboxes {
    boxes: Vec<Arc<Inbox>>,
}

impl Inboxes {
    pub(crate) fn new(devices: Vec<Streamed>, limit: u64) -> Self {
        Self { boxes: devices.into_iter().map(|device| Arc::new(Inbox::new(device, limit))).collect() }
    }

    /// The inbox for the chunks of a device.
    ///
    /// # Errors
    /// This machine has no such device, or the device has no stream.
    pub(crate) fn find(&self, name: &str, instance: u32) -> Result<&Arc<Inbox>, MigrationError> {
        let found =
            self.boxes.iter().find(|inbox| inbox.device.name == name && inbox.device.instance == instance);
        found.ok_or_else(|| MachineDifference::NoStreamHere { device: name.to_owned(), instance }.into())
    }

    pub(crate) fn all(&self) -> Vec<Arc<Inbox>> {
        self.boxes.clone()
    }

    /// Starts credit: sends the first grant for every device.
    pub(crate) fn begin_credit(
        &self,
        mut say: impl FnMut(&ReturnMessage) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| {
            let bytes = inbox.begin_credit();
            say(&grant(&inbox.device, bytes))
        })
    }

    /// Checks that all chunks have arrived.
    pub(crate) fn all_came(&self) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| inbox.all_came())
    }

    pub(crate) fn are_loaded(&self) -> bool {
        self.boxes.iter().all(|inbox| inbox.is_loaded())
    }

    /// Total bytes that were received and loaded, which show whether loading progresses.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let progress = self.boxes.iter().map(|inbox| inbox.progress());
        progress.fold((0, 0), |(came, loaded), one| (came + one.0, loaded + one.1))
    }

    /// Names a device that is not loaded yet, for an error message.
    pub(crate) fn unloaded(&self) -> Awaited {
        let late = self.boxes.iter().find(|inbox| !inbox.is_loaded());
        late.map_or(Awaited::Loading, |inbox| Awaited::DeviceStream {
            device: inbox.device.name.clone(),
            instance: inbox.device.instance,
        })
    }

    pub(crate) fn statistics(&self) -> Vec<StreamStatistics> {
        self.boxes.iter().map(|inbox| inbox.statistics()).collect()
    }

    pub(crate) fn stop(&self) {
        self.boxes.iter().for_each(|inbox| inbox.stop());
    }

    /// Prepares every inbox for a lost connection: each stream continues after its loaded part. No load thread
    /// may run.
    pub(crate) fn suspend(&self) {
        self.boxes.iter().for_each(|inbox| inbox.suspend());
    }

    /// Restarts every stream from its beginning.
    ///
    /// # Errors
    /// Loading stops before the loaded parts are discarded.
    pub(crate) fn begin_anew(&self) -> Result<(), MigrationError> {
        match self.boxes.iter().all(|inbox| inbox.begin_anew()) {
            true => Ok(()),
            false => Err(MigrationError::Cancelled),
        }
    }

    /// Resets every inbox for streams that restart. No load thread may run.
    pub(crate) fn restart(&self) {
        self.boxes.iter().for_each(|inbox| inbox.restart());
    }

    /// Whether a device has a stream.
    pub(crate) fn has_devices(&self) -> bool {
        !self.boxes.is_empty()
    }

    /// Checks that every device can run, before any of them does.
    pub(crate) fn check_run(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "run", |device| device.check_run())
    }

    /// Lets the devices run. Called before the vCPUs run.
    pub(crate) fn run_devices(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// As [`Inboxes::run_devices`], but continues after errors and returns them.
    pub(crate) fn run_devices_that_can(&self) -> Vec<MigrationError> {
        failed_in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// Stops the devices that run already, because the guest could not be started. Returns the errors.
    pub(crate) fn stop_devices(&self) -> Vec<MigrationError> {
        let devices = self.devices();
        let mut failed = failed_in_parallel(&devices, "quiesce", |device| device.quiesce());
        failed.extend(failed_in_parallel(&devices, "stop", |device| device.stop()));
        failed
    }

    /// Discards the state that the devices have loaded.
    pub(crate) fn end_load(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "forget what was loaded", |device| device.end_load())
    }

    fn devices(&self) -> Vec<Streamed> {
        self.boxes.iter().map(|inbox| inbox.device.clone()).collect()
    }
}

/// The message that grants the source a total of `bytes` for a device.
pub(super) fn grant(device: &Streamed, bytes: u64) -> ReturnMessage {
    ReturnMessage::Grant { device: device.name.clone(), instance: device.instance, bytes }
}
