//! Guest RAM for a back end: its memfds, and the guest addresses of their parts.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use sterna_ram::dirty::LoggedRange;
use sterna_ram::{GuestRam, PAGE_SIZE};
use vhost::VhostUserMemoryRegionInfo;

use super::error::VhostUserError;
use super::used_rings::Pages;

/// Highest number of ranges. Every back end accepts it, and no machine of this project has more.
const RANGES_MAX: usize = 8;
/// A *user address* of the protocol is the guest address plus this value. It is the same in every front-end
/// process. A back end can therefore keep its mappings and ring addresses when it is handed over
/// (`specs/vhost-user.md §1.1`). It is not 0, because 0 may mean "none".
const USER_ADDRESSES: u64 = 1 << 46;

/// The memory table for a back end.
#[derive(Default)]
pub(super) struct Table {
    pub(super) regions: Vec<VhostUserMemoryRegionInfo>,
    _files: Vec<Arc<File>>,
}

/// Guest RAM and its guest addresses, checked.
#[derive(Debug, Clone)]
pub(super) struct GuestMemory {
    ram: GuestRam,
    ranges: Vec<LoggedRange>,
}

impl GuestMemory {
    pub(super) fn new(
        device: &Arc<str>,
        ram: &GuestRam,
        ranges: &[LoggedRange],
    ) -> Result<Self, VhostUserError> {
        let refuse = |range, rule| VhostUserError::Memory { device: Arc::clone(device), range, rule };
        if ranges.is_empty() || ranges.len() > RANGES_MAX {
            return Err(refuse(ranges.len(), "a back end accepts 1 to 8 ranges"));
        }
        for (index, range) in ranges.iter().enumerate() {
            let refuse = |rule| refuse(index, rule);
            let block =
                ram.blocks().get(range.block).ok_or(refuse("it names a block that does not exist"))?;
            let end = range.first_page.checked_add(range.pages);
            if range.pages == 0 || end.is_none_or(|end| end > block.pages()) {
                return Err(refuse("it is not inside its block"));
            }
            let end = range.guest_address.checked_add(bytes(range.pages));
            if end.is_none_or(|end| end > USER_ADDRESSES) {
                return Err(refuse("it ends after the last address, 2^46"));
            }
            // Memory that arrives later from another process can be shared.
            if block.shared_file().is_none() && !block.is_gone() {
                return Err(refuse("private memory cannot be shared with a back end: use a memfd"));
            }
        }
        Ok(Self { ram: ram.clone(), ranges: ranges.to_vec() })
    }

    /// Builds the table for SET_MEM_TABLE. It keeps the descriptors open.
    pub(super) fn table(&self, device: &Arc<str>) -> Result<Table, VhostUserError> {
        let mut table = Table::default();
        for (index, range) in self.ranges.iter().enumerate() {
            let block = self.ram.block(range.block);
            let Some(shared) = block.shared_file() else {
                let rule = "another process has it, and this process has no replacement";
                return Err(VhostUserError::Memory { device: Arc::clone(device), range: index, rule });
            };
            table.regions.push(VhostUserMemoryRegionInfo {
                guest_phys_addr: range.guest_address,
                memory_size: bytes(range.pages),
                userspace_addr: USER_ADDRESSES + range.guest_address,
                mmap_offset: shared.offset + bytes(range.first_page),
                mmap_handle: shared.file.as_raw_fd(),
            });
            table._files.push(shared.file);
        }
        Ok(table)
    }

    /// The user address of `len` bytes at guest address `address`. `None` unless they are RAM and contiguous.
    /// The protocol uses user addresses for rings.
    pub(super) fn user_address(&self, address: u64, len: u64) -> Option<u64> {
        self.place(address, len).map(|_| USER_ADDRESSES + address)
    }

    /// The pages that contain `len` bytes (at least one) at guest address `address`. Same conditions as
    /// `user_address`.
    pub(super) fn pages(&self, address: u64, len: u64) -> Option<Pages> {
        let (block, offset) = self.place(address, len)?;
        let (first, last) = (offset / PAGE_SIZE as u64, (offset + len - 1) / PAGE_SIZE as u64);
        Some(Pages { block, first, count: last - first + 1 })
    }

    /// Reads the word at guest address `address`. The back end may write it at any time.
    pub(super) fn read_u16(&self, address: u64) -> Option<u16> {
        let (block, offset) = self.place(address, 2)?;
        let mut bytes = [0; 2];
        self.ram.block(block).read(offset, &mut bytes).ok()?;
        Some(u16::from_le_bytes(bytes))
    }

    /// The block of `len` bytes at guest address `address`, and their offset in it.
    fn place(&self, address: u64, len: u64) -> Option<(usize, u64)> {
        self.ranges.iter().find_map(|range| {
            let offset = address.checked_sub(range.guest_address)?;
            let fits = offset.checked_add(len)? <= bytes(range.pages);
            fits.then(|| (range.block, bytes(range.first_page) + offset))
        })
    }
}

fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}

#[cfg(test)]
mod tests {
    use sterna_ram::{Backing, RamBlock};
    use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

    use super::*;

    fn two_ranges() -> (GuestRam, Vec<LoggedRange>) {
        let block = |name: &str| RamBlock::new(name, 64 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block("low"), block("high")]).expect("RAM");
        let low = LoggedRange { guest_address: 0x10_0000, block: 0, first_page: 16, pages: 48 };
        let high = LoggedRange { guest_address: 1 << 32, block: 1, first_page: 0, pages: 64 };
        (ram, vec![low, high])
    }

    fn device() -> Arc<str> {
        "fs".into()
    }

    #[test]
    fn user_address_is_the_same_in_the_table_and_wherever_memory_is_mapped() {
        let (ram, ranges) = two_ranges();
        let memory = GuestMemory::new(&device(), &ram, &ranges).expect("memory");
        let other = GuestMemory::new(&device(), &two_ranges().0, &ranges).expect("memory");

        let found = memory.user_address(0x10_0008, 16);

        let table = memory.table(&device()).expect("a table").regions;
        assert_eq!(found, Some(table[0].userspace_addr + 8));
        assert_eq!(memory.user_address(1 << 32, 64 << 12), Some(table[1].userspace_addr));
        assert_eq!(found, other.user_address(0x10_0008, 16));
    }

    #[test]
    fn pages_of_bytes_across_a_seam_are_both() {
        let (ram, ranges) = two_ranges();
        let memory = GuestMemory::new(&device(), &ram, &ranges).expect("memory");

        let pages = |address, len| memory.pages(address, len);

        assert_eq!(pages(0x10_0ffc, 4), Some(Pages { block: 0, first: 16, count: 1 }));
        assert_eq!(pages(0x10_0ffc, 5), Some(Pages { block: 0, first: 16, count: 2 }));
        assert_eq!(pages(0, 1), None);
    }

    #[test]
    fn user_address_outside_or_across_the_end_is_none() {
        let (ram, ranges) = two_ranges();
        let memory = GuestMemory::new(&device(), &ram, &ranges).expect("memory");

        for (address, len) in [(0, 1), (0x10_0000 + (48 << 12) - 1, 2), (u64::MAX, 1), (1 << 32, u64::MAX)] {
            assert_eq!(memory.user_address(address, len), None, "{address:#x}");
        }
    }

    #[test]
    fn table_of_a_block_inside_a_file_counts_from_the_files_start() {
        let name = c"ram".to_owned();
        let file =
            File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(64 << 12).expect("room");
        let at = FileOffset::new(file, 24 << 12);
        let region =
            GuestRegionMmap::<()>::from_range(GuestAddress(0), 40 << 12, Some(at)).expect("a region");
        let memory = GuestMemoryMmap::from_regions(vec![region]).expect("guest memory");
        let ram = GuestRam::from_guest_memory(&memory, |_, _| "ram").expect("RAM");
        let part = LoggedRange { guest_address: 3 << 12, block: 0, first_page: 3, pages: 30 };

        let memory = GuestMemory::new(&device(), &ram, &[part]).expect("memory");
        let table = memory.table(&device()).expect("a table").regions;

        assert_eq!((table[0].mmap_offset, table[0].memory_size), (27 << 12, 30 << 12));
    }

    #[test]
    fn new_with_memory_that_cannot_be_shared_is_refused() {
        let block = RamBlock::new("ram", 4 << 12, Backing::Anonymous).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        let whole = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 4 };

        let error = GuestMemory::new(&device(), &ram, &[whole]).expect_err("private memory");

        assert!(error.to_string().contains("memfd"), "{error}");
    }

    #[test]
    fn new_with_ranges_that_are_not_in_the_ram_is_refused() {
        let (ram, ranges) = two_ranges();
        let longer = LoggedRange { pages: 49, ..ranges[0] };
        let stray = LoggedRange { block: 2, ..ranges[0] };
        let high = LoggedRange { guest_address: u64::MAX - 4095, ..ranges[0] };

        for bad in [vec![], vec![longer], vec![stray], vec![high], vec![ranges[0]; 9]] {
            assert!(GuestMemory::new(&device(), &ram, &bad).is_err(), "{bad:?}");
        }
    }
}
