//! Devices' streams at the destination: lanes put chunks in, one load thread per device takes them out in order.
//!
//! Loading begins with the first chunk. What is held for a device that loads slowly has a ceiling ([`inbox`]).

mod inbox;

use std::sync::Arc;
use std::time::Instant;

use sterna_wire::multifd::DeviceChunkKind;
use sterna_wire::return_path::ReturnMessage;

use super::shared::Shared;
use crate::error::MigrationError;
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};

pub(super) use inbox::Inbox;

/// The inboxes of all devices with a stream.
pub(super) struct Inboxes {
    boxes: Vec<Arc<Inbox>>,
}

impl Inboxes {
    pub fn new(devices: Vec<Streamed>, ceiling: u64) -> Self {
        Self { boxes: devices.into_iter().map(|device| Arc::new(Inbox::new(device, ceiling))).collect() }
    }

    /// Where chunks of a device go.
    ///
    /// # Errors
    /// There is no such device here, or it has no stream.
    pub fn find(&self, name: &str, instance: u32) -> Result<&Arc<Inbox>, MigrationError> {
        let found =
            self.boxes.iter().find(|inbox| inbox.device.name == name && inbox.device.instance == instance);
        found.ok_or_else(|| MigrationError::PeerIncompatible {
            what: format!(
                "a chunk of the state of device {name:?}, instance {instance}: no device here accepts it in that way; \
                 give both machines the same devices"
            ),
        })
    }

    pub fn all(&self) -> Vec<Arc<Inbox>> {
        self.boxes.clone()
    }

    /// The source keeps to grants: gives the first to every device.
    pub fn begin_credit(&self, shared: &Shared) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| {
            let bytes = inbox.begin_credit();
            shared.say(&grant(&inbox.device, bytes))
        })
    }

    /// All chunks must have come by now.
    pub fn all_came(&self) -> Result<(), MigrationError> {
        self.boxes.iter().try_for_each(|inbox| inbox.all_came())
    }

    pub fn are_loaded(&self) -> bool {
        self.boxes.iter().all(|inbox| inbox.is_loaded())
    }

    /// Bytes that came and that were loaded: whether anything moves.
    pub fn figures(&self) -> (u64, u64) {
        let figures = self.boxes.iter().map(|inbox| inbox.figures());
        figures.fold((0, 0), |(came, loaded), one| (came + one.0, loaded + one.1))
    }

    /// Names a device that is not loaded yet.
    pub fn unloaded(&self) -> String {
        let late = self.boxes.iter().find(|inbox| !inbox.is_loaded());
        late.map_or_else(String::new, |inbox| format!("the stream of {} to be loaded", inbox.device))
    }

    pub fn statistics(&self) -> Vec<StreamStatistics> {
        self.boxes.iter().map(|inbox| inbox.statistics()).collect()
    }

    pub fn stop(&self) {
        self.boxes.iter().for_each(|inbox| inbox.stop());
    }

    /// The devices run, before the vCPUs do.
    pub fn run_devices(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// As [`Inboxes::run_devices`], as far as that goes: what went wrong is returned.
    pub fn run_devices_that_can(&self) -> Vec<MigrationError> {
        failed_in_parallel(&self.devices(), "run", |device| device.run())
    }

    /// The guest could not be started: devices that run already stop. What went wrong is returned.
    pub fn stop_devices(&self) -> Vec<MigrationError> {
        let devices = self.devices();
        let mut failed = failed_in_parallel(&devices, "quiesce", |device| device.quiesce());
        failed.extend(failed_in_parallel(&devices, "stop", |device| device.stop()));
        failed
    }

    /// Forgets what was loaded.
    pub fn end_load(&self) -> Result<(), MigrationError> {
        in_parallel(&self.devices(), "forget what was loaded", |device| device.end_load())
    }

    fn devices(&self) -> Vec<Streamed> {
        self.boxes.iter().map(|inbox| inbox.device.clone()).collect()
    }
}

/// A load thread: works until its device is loaded, or all stops.
pub(super) fn load(shared: &Shared, inbox: &Inbox) {
    if let Err(error) = run(shared, inbox) {
        shared.fail(error);
    }
    shared.nudge();
}

fn run(shared: &Shared, inbox: &Inbox) -> Result<(), MigrationError> {
    let device = &inbox.device;
    device.call("begin to load", |stream| stream.begin_load())?;
    while let Some(chunk) = inbox.take() {
        let began = Instant::now();
        match chunk.kind {
            DeviceChunkKind::Data { .. } if chunk.data().is_empty() => {}
            DeviceChunkKind::Data { .. } => {
                device.call("load", |stream| stream.write(chunk.data()))?;
            }
            DeviceChunkKind::Configuration { total_bytes } => {
                inbox.check_total(total_bytes)?;
                device.call("finish loading", |stream| stream.finish_load(chunk.data()))?;
            }
        }
        let is_last = matches!(chunk.kind, DeviceChunkKind::Configuration { .. });
        if let Some(bytes) = inbox.loaded(chunk, began.elapsed()) {
            shared.say(&grant(device, bytes))?;
        }
        if is_last {
            break;
        }
    }
    Ok(())
}

fn grant(device: &Streamed, bytes: u64) -> ReturnMessage {
    ReturnMessage::Grant { device: device.name.clone(), instance: device.instance, bytes }
}
