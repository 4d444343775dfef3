//! The machine's disks and network cards, as an operator asks for them.

use super::KvmMachine;
use crate::config::{AnnounceOptions, DiskOptions};
use crate::error::VmmError;

impl KvmMachine {
    /// The disks and their present lengths in bytes, in the order of [`crate::MachineConfig::disks`].
    pub fn disks(&self) -> Vec<(DiskOptions, u64)> {
        let disks = self.hardware.virtio.all().iter().filter_map(|device| device.identity.disk.as_ref());
        disks.map(|disk| (disk.options.clone(), disk.len_bytes())).collect()
    }

    /// Makes disk `index` longer, with the guest running or not, and tells the guest. A block device must have become longer before.
    /// Its other side of a migration finds the new length by itself if both see the same file.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no such disk or no guest, if the disk is read-only or just being copied, or would become
    /// shorter, and if the host refuses.
    pub fn grow_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmmError> {
        let _one = self.operation();
        let refuse =
            |why: String| VmmError::State { what: "block_resize", why: format!("disk {index}: {why}") };
        let disk = self.hardware.virtio.all().get(index).filter(|device| device.identity.disk.is_some());
        let disk = disk.ok_or_else(|| refuse("there is none".to_owned()))?;
        if !self.has_guest() {
            return Err(refuse(
                "the machine waits for an incoming migration, and has not got it yet".to_owned(),
            ));
        }
        disk.grow(len_bytes).map_err(refuse)
    }

    /// Writes to disk `index` as a request of the running guest does. False if the guest stands, or there is no such disk.
    /// For benches: a guest that drives a disk needs minutes to boot where KVM emulates its instructions.
    #[cfg(feature = "bench")]
    #[doc(hidden)]
    pub fn write_to_disk(&self, index: usize, at: u64, bytes: &[u8]) -> std::io::Result<bool> {
        // Nobody stops the guest meanwhile.
        let _one = self.operation();
        let disk = self.hardware.virtio.all().get(index).and_then(|device| device.identity.disk.as_ref());
        match disk {
            Some(disk) if self.is_running() => disk.write(at, bytes).map(|()| true),
            _ => Ok(false),
        }
    }

    /// How the guest's network cards are announced after it has arrived.
    pub fn set_announcing(&self, options: AnnounceOptions) {
        self.hardware.virtio.announcers().iter().for_each(|card| card.set_options(options));
    }

    /// Announces network cards, by their numbers; without any, all. Another announcement of the same `id` ends with it.
    ///
    /// # Errors
    /// [`VmmError::State`] if there is no such card or no guest, [`VmmError::Thread`] if the host refuses.
    pub fn announce(&self, options: AnnounceOptions, cards: &[usize], id: &str) -> Result<(), VmmError> {
        let all = self.hardware.virtio.announcers();
        if !self.has_guest() {
            let why = "the machine waits for an incoming migration: its guest is somewhere else".to_owned();
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
