//! Collects devices' sections, instead of sending them.

use std::sync::Arc;

use sterna_transport::IoPart;

use super::{MainStream, Sink};
use crate::error::MigrationError;

/// Keeps all bytes that are written.
#[derive(Default)]
struct Collected(parking_lot::Mutex<Vec<u8>>);

impl Sink for Collected {
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError> {
        let mut collected = self.0.lock();
        for part in parts {
            match part {
                IoPart::Bytes(bytes) => collected.extend_from_slice(bytes),
                IoPart::Ram(_) => {
                    return Err(MigrationError::Internal("a device's section with pages".to_owned()));
                }
            }
        }
        Ok(())
    }
}

/// Collects the devices' sections of checkpoints, without waiting for data that is being sent.
pub(in crate::outgoing) struct DeviceCollector {
    stream: MainStream,
    collected: Arc<Collected>,
    /// The id of the first section.
    first: u32,
}

impl DeviceCollector {
    /// Collects the sections that `write` writes.
    pub(in crate::outgoing) fn collect(
        &mut self,
        write: impl FnOnce(&mut MainStream) -> Result<(), MigrationError>,
    ) -> Result<CollectedDevices, MigrationError> {
        self.stream.next_section = self.first;
        let written = write(&mut self.stream);
        self.stream.described.clear();
        let sections = std::mem::take(&mut *self.collected.0.lock());
        written?;
        Ok(CollectedDevices { sections, next_section: self.stream.next_section })
    }
}

/// The devices of a checkpoint, without the checkpoint's end.
pub(in crate::outgoing) struct CollectedDevices {
    /// All sections except the last.
    pub(in crate::outgoing) sections: Vec<u8>,
    #[cfg_attr(
        not(feature = "standby"),
        allow(dead_code, reason = "a checkpoint has a section after the devices")
    )]
    pub(super) next_section: u32,
}

impl MainStream {
    /// A collector for the devices of checkpoints, with the section ids of the seeding.
    pub(in crate::outgoing) fn device_collector(&self) -> DeviceCollector {
        let collected = Arc::<Collected>::default();
        let first = self.first_device.unwrap_or(self.next_section);
        // The bytes are counted when they are sent.
        let mut stream = Self::new(collected.clone(), Arc::default(), (self.ram_section, first));
        stream.configuration = self.configuration.clone();
        DeviceCollector { stream, collected, first }
    }
}
