//! Changes of a device's configuration space: disks that grow, and devices that other processes serve.

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;

use super::transport::Transport;

/// The source's description of a device.
pub(crate) struct Said<'a> {
    pub(crate) features: u64,
    /// For a device in another process: whether it has state of its own.
    pub(crate) has_state: bool,
    pub(crate) configuration: &'a [u8],
}

impl Transport {
    /// The configuration space that both sides of a migration must share. It is the initial one, because the
    /// destination's device reports later changes to the driver again. It contains a disk's current length.
    /// For a device in another process it is that process's current configuration space.
    pub(crate) fn configuration(&self) -> Vec<u8> {
        let mut bytes = self.identity.configuration.clone();
        if let Some(disk) = &self.identity.disk {
            bytes[..8].copy_from_slice(&disk.capacity());
        }
        if self.identity.process.is_some() {
            self.signals.space.read(0, &mut bytes);
        }
        bytes
    }

    /// Before a guest arrives: queries the device's process for its current configuration. A device that is
    /// handed over takes the source's description.
    pub(crate) fn find_configuration(&self, said: &Said<'_>) -> Result<(), String> {
        let Some(process) = &self.identity.process else { return self.find_length() };
        let now = match process.is_awaited() {
            true => process.expect(said.features, said.has_state, said.configuration),
            false => process.configuration_space(),
        };
        let now = now.map_err(|error| error.to_string())?;
        self.signals.space.change(|bytes| bytes.copy_from_slice(&now));
        Ok(())
    }

    /// Like [`Transport::find_configuration`], for a guest whose driver has stopped. It restores the
    /// configuration that the driver read last. The record of a machine that waits for its guest contains
    /// zeros.
    pub(crate) fn find_read(&self, configuration: &[u8]) -> Result<(), String> {
        let process = self.identity.process.as_ref().filter(|process| process.is_awaited());
        let is_of_length = configuration.len() == self.identity.configuration.len();
        let Some(process) = process.filter(|_| is_of_length) else { return Ok(()) };
        let has_read = configuration.iter().any(|byte| *byte != 0);
        if has_read {
            let (features, has_state) = (self.identity.features(), process.has_state());
            return self.find_configuration(&Said { features, has_state, configuration });
        }
        self.signals.space.change(|bytes| bytes.fill(0));
        Ok(())
    }

    /// Before a guest arrives: reads the disk's current length from its file.
    pub(crate) fn find_length(&self) -> Result<(), String> {
        let Some(disk) = &self.identity.disk else { return Ok(()) };
        let before = disk.capacity();
        disk.find_length()?;
        if disk.capacity() != before {
            self.signals.space.change(|bytes| bytes[..8].copy_from_slice(&disk.capacity()));
        }
        Ok(())
    }

    /// Makes a disk longer and notifies its driver. The error says why this is not possible.
    pub(crate) fn grow(&self, len_bytes: u64) -> Result<(), String> {
        let disk = self.identity.disk.as_ref().ok_or("it is not a disk")?;
        disk.grow(len_bytes)?;
        let change = |bytes: &mut [u8]| bytes[..8].copy_from_slice(&disk.capacity());
        // A driver that is not ready yet reads the length when it becomes ready.
        if self.signals.status.load(Ordering::SeqCst) & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.change_configuration(change);
        } else {
            self.signals.space.change(change);
        }
        Ok(())
    }
}
