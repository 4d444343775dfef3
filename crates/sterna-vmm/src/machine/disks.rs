//! An operator's calls for the machine's disks and network cards.

use super::KvmMachine;
use crate::config::{AnnounceOptions, DiskOptions};
use crate::error::VmmError;

impl KvmMachine {
    /// The disks and their current lengths in bytes, in the order of [`crate::MachineConfig::disks`].
    pub fn disks(&self) -> Vec<(DiskOptions, u64)> {
        let disks = self.hardware.virtio.all().iter().filter_map(|device| device.identity.disk.as_ref());
        disks.map(|disk| (disk.options.clone(), disk.len_bytes())).collect()
    }

    /// Grows disk `index` to `len_bytes` and notifies the guest, which may run or be paused. A block device
    /// must have been grown before. The other side of a migration detects the new length by itself if both
    /// sides use the same file.
    ///
    /// [`VmmError::State`] if there is no such disk or no guest, or if the host refuses. The same if the disk
    /// is read-only or just being copied, or would become shorter.
    pub fn grow_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmmError> {
        let _one = self.operation();
        let refuse =
            |why: String| VmmError::State { what: "block_resize", why: format!("disk {index}: {why}") };
        let disk = self.hardware.virtio.all().get(index).filter(|device| device.identity.disk.is_some());
        let disk = disk.ok_or_else(|| refuse("there is no such disk".to_owned()))?;
        if !self.has_guest() {
            return Err(refuse(
                "the machine waits for an incoming migration, which has not brought the disk yet".to_owned(),
            ));
        }
        disk.grow(len_bytes).map_err(refuse)
    }

    /// Writes to disk `index` like a request of the running guest. False if the guest is paused, or there is
    /// no such disk. For benches: a guest that drives a disk needs minutes to boot where KVM emulates its
    /// instructions.
    #[cfg(feature = "bench")]
    #[doc(hidden)]
    pub fn write_to_disk(&self, index: usize, at: u64, bytes: &[u8]) -> std::io::Result<bool> {
        // The lock prevents another thread from stopping the guest during the write.
        let _one = self.operation();
        let disk = self.hardware.virtio.all().get(index).and_then(|device| device.identity.disk.as_ref());
        match disk {
            Some(disk) if self.is_running() => disk.write(at, bytes).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Sets how the network cards announce the guest after a migration.
    pub fn set_announcing(&self, options: AnnounceOptions) {
        self.hardware.virtio.announcers().iter().for_each(|card| card.set_options(options));
    }

    /// Announces the named network cards, or all cards if `cards` is empty. An earlier announcement with the
    /// same `id` ends.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no such card or no guest; [`VmmError::Thread`] if the host refuses a
    /// thread.
    pub fn announce(&self, options: AnnounceOptions, cards: &[usize], id: &str) -> Result<(), VmmError> {
        let all = self.hardware.virtio.announcers();
        if !self.has_guest() {
            let why = "the machine waits for an incoming migration and has no guest yet".to_owned();
            return Err(VmmError::State { what: "announce-self", why });
        }
        if let Some(none) = cards.iter().find(|card| **card >= all.len()) {
            let why = format!("there is no network card {none}, the machine has {}", all.len());
            return Err(VmmError::State { what: "announce-self", why });
        }
        for (index, card) in all.iter().enumerate() {
            if cards.is_empty() || cards.contains(&index) {
                let of = format!("the announcement of network card {index}");
                card.announce_as(options, id).map_err(|source| VmmError::Thread { of, source })?;
            }
        }
        Ok(())
    }
}
