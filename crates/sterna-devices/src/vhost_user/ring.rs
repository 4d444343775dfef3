//! The addresses of a ring, and the back end's position in it.

use std::sync::Arc;

use vhost::VringConfigData;

use super::error::VhostUserError;
use super::memory::GuestMemory;
use super::used_rings::Pages;

/// Highest number of entries of a split ring.
const SIZE_MAX: u16 = 1 << 15;

/// A split virtqueue, set up by the guest's driver. Addresses are guest-physical.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ring {
    /// Number of entries, a power of two.
    pub size: u16,
    /// Address of the descriptor table, 16 bytes per entry.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Index of the first available entry that the back end has not taken. 0 for a new ring.
    pub base: u16,
}

impl Ring {
    /// Refuses an invalid ring. Returns the ring in the protocol's form, with user addresses, and the pages
    /// of its used ring.
    pub(super) fn check(
        &self,
        device: &Arc<str>,
        index: usize,
        memory: &GuestMemory,
    ) -> Result<(VringConfigData, Pages), VhostUserError> {
        let refuse = |rule| VhostUserError::Ring { device: Arc::clone(device), ring: index, rule };
        if !self.size.is_power_of_two() || self.size > SIZE_MAX {
            return Err(refuse("its size is not a power of two up to 32768"));
        }
        let size = u64::from(self.size);
        let find = |address: u64, align: u64, len: u64, rule| {
            let aligned = address.is_multiple_of(align);
            memory.user_address(address, len).filter(|_| aligned).ok_or(refuse(rule))
        };
        let used_bytes = 6 + 8 * size;
        let addresses = VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: find(self.descriptors, 16, 16 * size, "its descriptors are not in RAM")?,
            avail_ring_addr: find(self.available, 2, 6 + 2 * size, "its available ring is not in RAM")?,
            used_ring_addr: find(self.used, 4, used_bytes, "its used ring is not in RAM")?,
            log_addr: None,
        };
        let used = memory.pages(self.used, used_bytes).ok_or(refuse("its used ring is not in RAM"))?;
        Ok((addresses, used))
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::dirty::LoggedRange;
    use sterna_ram::{Backing, GuestRam, RamBlock};

    use super::*;

    #[test]
    fn check_of_rings_that_do_not_fit_refuses() {
        let block = RamBlock::new("ram", 16 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        let whole = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 16 };
        let device: Arc<str> = "fs".into();
        let memory = GuestMemory::new(&device, &ram, &[whole]).expect("memory");
        let good = Ring { size: 128, descriptors: 0x1000, available: 0x2000, used: 0x3000, base: 0 };

        assert!(good.check(&device, 0, &memory).is_ok());
        for bad in [
            Ring { size: 0, ..good },
            Ring { size: 100, ..good },
            Ring { descriptors: 0x1008, ..good },
            Ring { descriptors: 0xf810, ..good },
            Ring { available: 0x2001, ..good },
            Ring { available: 0xffff_ffff_ffff_fffe, ..good },
            Ring { used: 0x3002, ..good },
            Ring { used: 0x10_0000, ..good },
        ] {
            assert!(bad.check(&device, 0, &memory).is_err(), "{bad:?}");
        }
    }
}
