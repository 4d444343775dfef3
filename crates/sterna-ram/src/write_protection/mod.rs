//! Write protection that blocks the first write to a page until the page is released.
//!
//! The mechanism is synchronous userfaultfd. It blocks writes of this process's threads, if they use the
//! block's own mapping. It also blocks writes of the kernel on their behalf (`read(2)` into guest RAM,
//! O_DIRECT, KVM for a vCPU). It does not block
//!
//! - writes through another mapping of the same memory: another process's (vhost-user, vfio-user), or a second
//!   one of this process;
//! - writes of a device that pinned the page before (VFIO);
//! - the loss of content when memory is given back. [`RamBlock::pin`] prevents the engine from doing that.
//!
//! The caller must release every blocked writer: one thread reports them ([`WriteProtection::serve`]), and
//! [`WriteProtection::lift`] releases all. Dropping lifts the protection, too. When the process ends, no writer
//! stays blocked.
//!
//! Blocking the kernel's writes needs a right: CAP_SYS_PTRACE, `/dev/userfaultfd`, or
//! `vm.unprivileged_userfaultfd`. A mapping can be registered with one userfaultfd only. Memory that
//! [`UffdDirtyLog`](crate::dirty::UffdDirtyLog) tracks can therefore not be protected.

mod error;

use std::ops::Range;

use linux_raw_sys::general::{
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED,
    UFFDIO_REGISTER_MODE_WP,
};
use parking_lot::RwLock;

pub use error::WriteProtectionError;

use crate::page::PAGE_SHIFT;
use crate::userfault::{Stop, Unsupported, Userfault};
use crate::{GuestRam, RamBlock};

/// `WP_UNPOPULATED` is needed because the first write to unpopulated memory must block, too.
const FEATURES: u32 =
    UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED;

/// Blocks writes to protected pages of guest RAM. No page is protected at first.
#[derive(Debug)]
pub struct WriteProtection {
    ram: GuestRam,
    kernel: Userfault,
    stop: Stop,
    /// For each block, the reason why it cannot be protected.
    refused: Vec<Option<WriteProtectionError>>,
    /// Address range and block index of each block that can be protected; ordered by address.
    places: Vec<(Range<u64>, usize)>,
    /// `false` once lifted. Locked for reading while pages are protected or released.
    is_on: RwLock<bool>,
}

impl WriteProtection {
    /// Registers all blocks whose memory supports protection. [`WriteProtection::refused`] lists the others.
    ///
    /// # Errors
    /// [`WriteProtectionError::Unsupported`]; and the first block's reason if no block can be protected.
    pub fn new(ram: &GuestRam) -> Result<Self, WriteProtectionError> {
        let kernel = Userfault::open(FEATURES).map_err(unsupported)?;
        let mut refused: Vec<_> = ram.blocks().iter().map(|block| register(&kernel, block).err()).collect();
        let is_covered = |index: &usize| refused[*index].is_none();
        let mut places: Vec<_> = (0..refused.len())
            .filter(is_covered)
            .map(|index| (bytes_of(ram.block(index), 0, ram.block(index).pages()), index))
            .collect();
        if places.is_empty() {
            let reason = refused.iter_mut().find_map(Option::take);
            return Err(reason.unwrap_or(WriteProtectionError::NoMemory));
        }
        places.sort_by_key(|(bytes, _)| bytes.start);
        let stop = Stop::new().map_err(|source| WriteProtectionError::System { call: "eventfd", source })?;
        Ok(Self { ram: ram.clone(), kernel, stop, refused, places, is_on: RwLock::new(true) })
    }

    /// Whether writes to this block can be blocked.
    pub fn covers(&self, block: usize) -> bool {
        self.refused.get(block).is_some_and(Option::is_none)
    }

    /// Returns the reasons why some blocks cannot be protected.
    pub fn refused(&self) -> impl Iterator<Item = &WriteProtectionError> {
        self.refused.iter().flatten()
    }

    /// Protects pages by one system call: from now on, each first write blocks.
    ///
    /// # Errors
    /// [`WriteProtectionError`]. Some of the pages may be protected then, so the caller must release them.
    pub fn protect(&self, block: usize, first: u64, count: u64) -> Result<(), WriteProtectionError> {
        let bytes = self.checked(block, first, count)?;
        let is_on = self.is_on.read();
        if !*is_on {
            return Err(WriteProtectionError::Lifted);
        }
        self.kernel.set_protected(&bytes, true).map_err(self.failed("UFFDIO_WRITEPROTECT", block))
    }

    /// Releases pages: blocked and later writers continue.
    ///
    /// # Errors
    /// [`WriteProtectionError`]. Writers may still be blocked then, so the caller must
    /// [lift](WriteProtection::lift) the protection.
    pub fn release(&self, block: usize, first: u64, count: u64) -> Result<(), WriteProtectionError> {
        let bytes = self.checked(block, first, count)?;
        let is_on = self.is_on.read();
        if !*is_on {
            // `lift` has released all pages.
            return Ok(());
        }
        self.kernel.set_protected(&bytes, false).map_err(self.failed("UFFDIO_WRITEPROTECT", block))
    }

    /// Releases all writers permanently. No page can be protected afterwards.
    pub fn lift(&self) {
        let mut is_on = self.is_on.write();
        if !std::mem::replace(&mut *is_on, false) {
            return;
        }
        for (bytes, _) in &self.places {
            self.kernel.unprotect(bytes);
        }
    }

    /// Whether the protection was [lifted](WriteProtection::lift).
    pub fn is_lifted(&self) -> bool {
        !*self.is_on.read()
    }

    /// Waits for writers and calls `held(block, page)` for each; the caller must
    /// [release](WriteProtection::release) the page.
    ///
    /// Several writers may wait for one page. Returns after [`WriteProtection::stop_serving`].
    ///
    /// # Errors
    /// [`WriteProtectionError::System`]. Writers are not reported any more, so the caller must
    /// [lift](WriteProtection::lift) the protection.
    pub fn serve(&self, mut held: impl FnMut(usize, u64)) -> Result<(), WriteProtectionError> {
        let failed = |source| WriteProtectionError::System { call: "read of a userfaultfd", source };
        let mut writers = Vec::new();
        while self.kernel.wait(&self.stop, &mut writers).map_err(failed)? {
            for writer in writers.drain(..) {
                if let Some((block, page)) = self.page_at(writer.address) {
                    held(block, page);
                }
            }
        }
        Ok(())
    }

    /// Makes the current or the next call of [`WriteProtection::serve`] return.
    pub fn stop_serving(&self) {
        self.stop.set();
    }

    fn page_at(&self, address: u64) -> Option<(usize, u64)> {
        let after = self.places.partition_point(|(bytes, _)| bytes.start <= address);
        let (bytes, block) = self.places.get(after.checked_sub(1)?)?;
        bytes.contains(&address).then(|| (*block, (address - bytes.start) >> PAGE_SHIFT))
    }

    fn checked(&self, block: usize, first: u64, count: u64) -> Result<Range<u64>, WriteProtectionError> {
        let outside = || WriteProtectionError::Outside { block, first, count };
        let found = self.ram.blocks().get(block).filter(|_| self.covers(block)).ok_or_else(outside)?;
        found.check_pages(first, count).map_err(|_| outside())?;
        if count == 0 {
            return Err(outside());
        }
        Ok(bytes_of(found, first, count))
    }

    fn failed(
        &self,
        call: &'static str,
        block: usize,
    ) -> impl FnOnce(std::io::Error) -> WriteProtectionError {
        move |source| WriteProtectionError::Block {
            block: self.ram.block(block).name().to_owned(),
            call,
            source,
        }
    }
}

impl Drop for WriteProtection {
    fn drop(&mut self) {
        // Closing the descriptor is not enough, because a forked child may have it open, too.
        self.lift();
    }
}

fn unsupported(Unsupported { is_feature, source }: Unsupported) -> WriteProtectionError {
    let what =
        if is_feature { "UFFD_FEATURE_WP_UNPOPULATED" } else { "userfaultfd(2) for writes of the kernel" };
    WriteProtectionError::Unsupported { what, source }
}

fn register(kernel: &Userfault, block: &RamBlock) -> Result<(), WriteProtectionError> {
    let name = || block.name().to_owned();
    let rule = if block.mapped_bytes() == 0 {
        Some("it has no memory")
    } else if block.is_read_only() {
        Some("it cannot be written through this mapping")
    } else if block.page_bytes() > crate::page::PAGE_BYTES {
        Some("huge pages can be protected only as a whole, so a write would wait for the copy of a huge page")
    } else if !block.permissions().userfaultfd {
        Some("its VMM does not permit the engine to register it with userfaultfd (MemoryPermissions)")
    } else {
        None
    };
    if let Some(rule) = rule {
        return Err(WriteProtectionError::Refused { block: name(), rule });
    }
    let bytes = bytes_of(block, 0, block.pages());
    kernel.register(&bytes, UFFDIO_REGISTER_MODE_WP).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => WriteProtectionError::Taken { block: name() },
        _ => WriteProtectionError::Block { block: name(), call: "UFFDIO_REGISTER", source },
    })
}

fn bytes_of(block: &RamBlock, first: u64, count: u64) -> Range<u64> {
    let start = block.host_address() as u64 + (first << PAGE_SHIFT);
    start..start + (count << PAGE_SHIFT)
}
