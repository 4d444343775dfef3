//! Disks become longer while a guest uses them, or before it comes.

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;

use super::transport::Transport;

impl Transport {
    /// The configuration space that both sides of a migration must have: as it is at first, since what a device here changes it
    /// tells its driver again at the destination; with a disk's length as it is now. What another process says is whatever it says
    /// now.
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

    /// Before a guest comes: asks another process what its device is like now.
    pub(crate) fn find_configuration(&self) -> Result<(), String> {
        let Some(process) = &self.identity.process else { return self.find_length() };
        let now = process.configuration_space().map_err(|error| error.to_string())?;
        self.signals.space.change(|bytes| bytes.copy_from_slice(&now));
        Ok(())
    }

    /// Before a guest comes: looks how long its disk is now.
    pub(crate) fn find_length(&self) -> Result<(), String> {
        let Some(disk) = &self.identity.disk else { return Ok(()) };
        let before = disk.capacity();
        disk.find_length()?;
        if disk.capacity() != before {
            self.signals.space.change(|bytes| bytes[..8].copy_from_slice(&disk.capacity()));
        }
        Ok(())
    }

    /// Makes a disk longer, and tells its driver. Why it cannot be.
    pub(crate) fn grow(&self, len_bytes: u64) -> Result<(), String> {
        let disk = self.identity.disk.as_ref().ok_or("it is no disk")?;
        disk.grow(len_bytes)?;
        let change = |bytes: &mut [u8]| bytes[..8].copy_from_slice(&disk.capacity());
        // A driver that is not ready yet reads the length when it is.
        if self.signals.status.load(Ordering::SeqCst) & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.change_configuration(change);
        } else {
            self.signals.space.change(change);
        }
        Ok(())
    }
}
