//! Write protection that holds whoever writes: a page's first write waits until it is let through.
//!
//! userfaultfd, synchronous. It holds the writes of this process's threads and of the kernel on their behalf (`read(2)` into guest RAM,
//! O_DIRECT, KVM for a vCPU) through the block's own mapping. Not held are
//!
//! - writes through another mapping of the same memory: another process's (vhost-user, vfio-user), or a second one of this process;
//! - a device's that has pinned the page before (VFIO);
//! - memory that is given back. [`RamBlock::pin`] keeps the engine from that.
//!
//! Whoever asks for protection owes every writer an answer: a thread serves the writers ([`WriteProtection::serve`]), and
//! [`WriteProtection::lift`] lets all of them go on. Dropping does the same. A process that ends lets nobody wait.
//!
//! It needs the right to hold the kernel's writes: CAP_SYS_PTRACE, `/dev/userfaultfd`, or `vm.unprivileged_userfaultfd`. Each mapping
//! belongs to one userfaultfd, so memory that [`UffdDirtyLog`](crate::dirty::UffdDirtyLog) tracks cannot be protected by this.

mod error;

use std::ops::Range;

use linux_raw_sys::general::{
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED,
    UFFDIO_REGISTER_MODE_WP,
};
use parking_lot::RwLock;

pub use error::WriteProtectionError;

use crate::userfault::{Stop, Unsupported, Userfault};
use crate::{GuestRam, PAGE_SHIFT, RamBlock};

/// Also of memory that is not populated: whoever writes there first must wait, too.
const FEATURES: u32 =
    UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED;

/// Holds writes to guest RAM. Nothing is protected at first.
#[derive(Debug)]
pub struct WriteProtection {
    ram: GuestRam,
    kernel: Userfault,
    stop: Stop,
    /// By block: why it cannot be protected.
    refused: Vec<Option<WriteProtectionError>>,
    /// Bytes of this process and their block, of those that can be protected; ordered.
    places: Vec<(Range<u64>, usize)>,
    /// False once lifted. Held while pages are protected.
    is_on: RwLock<bool>,
}

impl WriteProtection {
    /// Gets ready to hold writes to all blocks whose memory allows it. [`WriteProtection::refused`] tells of the others.
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

    /// Whether writes to this block can be held.
    pub fn covers(&self, block: usize) -> bool {
        self.refused.get(block).is_some_and(Option::is_none)
    }

    /// Why some blocks cannot be protected.
    pub fn refused(&self) -> impl Iterator<Item = &WriteProtectionError> {
        self.refused.iter().flatten()
    }

    /// From now on every first write to these pages waits. One call of the kernel.
    ///
    /// # Errors
    /// [`WriteProtectionError`]; some of the pages may be protected then. Release them.
    pub fn protect(&self, block: usize, first: u64, count: u64) -> Result<(), WriteProtectionError> {
        let bytes = self.checked(block, first, count)?;
        let is_on = self.is_on.read();
        if !*is_on {
            return Err(WriteProtectionError::Lifted);
        }
        self.kernel.set_protected(&bytes, true).map_err(self.failed("UFFDIO_WRITEPROTECT", block))
    }

    /// Lets writers of these pages go on, those that wait and those that come.
    ///
    /// # Errors
    /// [`WriteProtectionError`]: writers may wait still. [`WriteProtection::lift`] is what is left to do.
    pub fn release(&self, block: usize, first: u64, count: u64) -> Result<(), WriteProtectionError> {
        let bytes = self.checked(block, first, count)?;
        let is_on = self.is_on.read();
        if !*is_on {
            // All are released.
            return Ok(());
        }
        self.kernel.set_protected(&bytes, false).map_err(self.failed("UFFDIO_WRITEPROTECT", block))
    }

    /// Lets all writers go on, for ever. Nothing can be protected afterwards.
    pub fn lift(&self) {
        let mut is_on = self.is_on.write();
        if !std::mem::replace(&mut *is_on, false) {
            return;
        }
        for (bytes, _) in &self.places {
            self.kernel.unprotect(bytes);
        }
    }

    /// Whether it was [lifted](WriteProtection::lift).
    pub fn is_lifted(&self) -> bool {
        !*self.is_on.read()
    }

    /// Waits for writers: `held(block, page)` is called for each, and owes it a [release](WriteProtection::release). Several
    /// may wait for one page. Returns after [`WriteProtection::stop_serving`].
    ///
    /// # Errors
    /// [`WriteProtectionError::System`]: nobody is served any more. [Lift](WriteProtection::lift) the protection.
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

    /// Has [`WriteProtection::serve`] return, now or when it is called.
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
        // Closing would not do: a process that was forked off may have the descriptor, too.
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
        Some("it cannot be written by way of this mapping")
    } else if block.page_bytes() > crate::PAGE_BYTES {
        Some("huge pages are protected whole, so a write would wait for the copy of a huge page")
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
