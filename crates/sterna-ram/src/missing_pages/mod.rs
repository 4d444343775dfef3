//! Guest RAM whose pages come while the guest runs: whoever touches a page that is not there waits until it is placed.
//!
//! userfaultfd, for missing pages. It holds the threads of this process and the kernel on their behalf (KVM for a vCPU,
//! `read(2)` into guest RAM) that touch a page through the block's own mapping. Not held are
//!
//! - another mapping of the same memory: another process's (vhost-user, vfio-user), or a second one of this process;
//! - a device that has pinned the memory (VFIO): it has its pages already.
//!
//! So a VM with either of them cannot have pages that come later; who knows of them refuses it.
//!
//! Whoever [registers](MissingPages::register) owes every thread that waits an answer: [`MissingPages::wait`] tells of them,
//! [`MissingPages::place`] and [`MissingPages::place_zeros`] answer. After [`MissingPages::end`] nobody waits any more, and a page
//! that is still missing reads as zero. **That must not happen to a guest that runs**, so dropping does not do it: the memory
//! stays registered as long as the process lives, and whoever touches a missing page waits for ever.
//!
//! A page is placed whole and at once: nobody sees half of one. On huge pages a whole huge page is placed.

mod ahead;
mod error;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use linux_raw_sys::general::{
    UFFD_FEATURE_MISSING_HUGETLBFS, UFFD_FEATURE_MISSING_SHMEM, UFFD_FEATURE_THREAD_ID,
    UFFDIO_REGISTER_MODE_MISSING,
};
use parking_lot::Mutex;

pub use ahead::TakenAhead;
pub use error::MissingPagesError;

use crate::mapping::{Backing, Kind};
use crate::userfault::{self, Stop, Unsupported, Userfault};
use crate::{GuestRam, PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE, RamBlock};

const FEATURES: u32 = UFFD_FEATURE_MISSING_HUGETLBFS | UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_THREAD_ID;

/// Those that were dropped with pages missing: closing their descriptors would let the guest see zeros.
static LEFT: Mutex<Vec<Arc<Userfault>>> = Mutex::new(Vec::new());

/// A thread touches a page that is not there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fault {
    /// Index of the block.
    pub block: usize,
    /// The first page, and how many: one page of the memory below.
    pub first: u64,
    /// See [`Fault::first`].
    pub count: u64,
    /// The thread that waits (`gettid(2)`).
    pub thread: u32,
}

/// Holds whoever touches a page of guest RAM that is not there.
#[derive(Debug)]
pub struct MissingPages {
    ram: GuestRam,
    kernel: Arc<Userfault>,
    stop: Stop,
    /// Bytes of this process and their block; ordered.
    places: Vec<(Range<u64>, usize)>,
    /// Zeros for a whole page of the largest memory below, where that is huge. Never written: it takes no memory.
    zeros: Option<RamBlock>,
    is_registered: AtomicBool,
}

impl MissingPages {
    /// Whether this host and this process can do it at all, whatever the memory is.
    ///
    /// # Errors
    /// [`MissingPagesError::Unsupported`].
    pub fn probe() -> Result<(), MissingPagesError> {
        Userfault::open(FEATURES).map(drop).map_err(unsupported)
    }

    /// Whether all of `ram`'s memory is of the kind whose pages can come later. Changes nothing.
    ///
    /// # Errors
    /// [`MissingPagesError::Refused`], with the first block that is not.
    pub fn check(ram: &GuestRam) -> Result<(), MissingPagesError> {
        ram.blocks().iter().try_for_each(check)
    }

    /// Gets ready. Nothing is registered yet.
    ///
    /// # Errors
    /// [`MissingPagesError::Unsupported`], [`MissingPagesError::Refused`], [`MissingPagesError::System`].
    pub fn new(ram: &GuestRam) -> Result<Self, MissingPagesError> {
        Self::check(ram)?;
        let kernel = Arc::new(Userfault::open(FEATURES).map_err(unsupported)?);
        let stop = Stop::new().map_err(|source| MissingPagesError::System { call: "eventfd", source })?;
        let blocks = ram.blocks().iter().enumerate();
        let mut places: Vec<_> =
            blocks.map(|(index, block)| (bytes_of(block, 0, block.pages()), index)).collect();
        places.sort_by_key(|(bytes, _)| bytes.start);
        let most = ram.blocks().iter().map(RamBlock::page_bytes).max().unwrap_or(PAGE_BYTES);
        let zeros = (most > PAGE_BYTES).then(|| RamBlock::new("zeros", most, Backing::Anonymous)).transpose();
        let zeros = zeros.map_err(MissingPagesError::Staging)?;
        Ok(Self { ram: ram.clone(), kernel, stop, places, zeros, is_registered: AtomicBool::new(false) })
    }

    /// From now on whoever touches a page that is not there waits. If it fails, nobody does.
    ///
    /// # Errors
    /// [`MissingPagesError::Taken`], [`MissingPagesError::Block`].
    pub fn register(&self) -> Result<(), MissingPagesError> {
        self.is_registered.store(true, Ordering::Release);
        for (bytes, index) in &self.places {
            let name = || self.ram.block(*index).name().to_owned();
            let registered = self.kernel.register(bytes, UFFDIO_REGISTER_MODE_MISSING);
            if let Err(source) = registered {
                self.end();
                return Err(match source.raw_os_error() {
                    Some(libc::EBUSY) => MissingPagesError::Taken { block: name() },
                    _ => MissingPagesError::Block { block: name(), call: "UFFDIO_REGISTER", source },
                });
            }
        }
        Ok(())
    }

    /// Takes pages away, whatever they hold, so that they are missing. Whole pages of the memory below.
    ///
    /// # Errors
    /// [`MissingPagesError::Discard`], [`MissingPagesError::Outside`].
    pub fn take_away(&self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        self.checked(block, first, count)?;
        Ok(self.ram.block(block).discard_pages(first, count)?)
    }

    /// Puts pages in place that are missing, and lets whoever waits for them go on. Whole pages of the memory below. False: a page
    /// was there, and what came after it was not placed.
    ///
    /// # Errors
    /// [`MissingPagesError`].
    pub fn place(&self, block: usize, first: u64, content: &[u8]) -> Result<bool, MissingPagesError> {
        let bytes = self.checked(block, first, (content.len() / PAGE_SIZE) as u64)?;
        self.copy(block, bytes.start, content.as_ptr(), content.len() as u64)
    }

    /// As [`MissingPages::place`], of a huge page whose content was put together in a block of its own.
    ///
    /// # Errors
    /// [`MissingPagesError`].
    pub fn place_block(
        &self,
        block: usize,
        first: u64,
        content: &RamBlock,
    ) -> Result<bool, MissingPagesError> {
        let bytes = self.checked(block, first, content.pages())?;
        // Where it meets a page fault, the kernel begins again by way of one more huge page, and there may be none.
        content.populate_to_read().map_err(MissingPagesError::Staging)?;
        self.copy(block, bytes.start, content.host_address(), content.len_bytes())
    }

    /// As [`MissingPages::place`], of pages that are zero.
    ///
    /// # Errors
    /// [`MissingPagesError`].
    pub fn place_zeros(&self, block: usize, first: u64, count: u64) -> Result<bool, MissingPagesError> {
        let bytes = self.checked(block, first, count)?;
        let unit = self.ram.block(block).page_bytes();
        if unit == PAGE_BYTES {
            return self.kernel.zero(&bytes).map_err(self.failed("UFFDIO_ZEROPAGE", block));
        }
        let Some(zeros) = &self.zeros else { return Ok(true) };
        zeros.populate_to_read().map_err(MissingPagesError::Staging)?;
        for start in bytes.step_by(unit as usize) {
            if !self.copy(block, start, zeros.host_address(), unit)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Has whoever waits for these pages look again.
    ///
    /// # Errors
    /// [`MissingPagesError`].
    pub fn wake(&self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        let bytes = self.checked(block, first, count)?;
        self.kernel.wake(&bytes).map_err(self.failed("UFFDIO_WAKE", block))
    }

    /// Waits for threads that touch a page that is not there, and adds them. Several may wait for one page. False: after
    /// [`MissingPages::stop_waiting`].
    ///
    /// # Errors
    /// [`MissingPagesError::System`].
    pub fn wait(&self, faults: &mut Vec<Fault>) -> Result<bool, MissingPagesError> {
        let failed = |source| MissingPagesError::System { call: "read of a userfaultfd", source };
        let mut found = Vec::new();
        let goes_on = self.kernel.wait(&self.stop, &mut found).map_err(failed)?;
        faults.extend(found.into_iter().filter_map(|fault| self.found(fault)));
        Ok(goes_on)
    }

    /// Has [`MissingPages::wait`] return, now or when it is called.
    pub fn stop_waiting(&self) {
        self.stop.set();
    }

    /// Lets everybody go on, for ever: all pages are there, or no guest runs that would see zeros for those that are not.
    pub fn end(&self) {
        if self.is_registered.swap(false, Ordering::AcqRel) {
            self.places.iter().for_each(|(bytes, _)| self.kernel.unregister(bytes));
        }
    }

    fn found(&self, fault: userfault::Fault) -> Option<Fault> {
        let after = self.places.partition_point(|(bytes, _)| bytes.start <= fault.address);
        let (bytes, block) = self.places.get(after.checked_sub(1)?)?;
        let unit = self.ram.block(*block).page_bytes();
        let first = ((fault.address - bytes.start) / unit * unit) >> PAGE_SHIFT;
        let found = Fault { block: *block, first, count: unit >> PAGE_SHIFT, thread: fault.thread };
        bytes.contains(&fault.address).then_some(found)
    }

    fn copy(
        &self,
        block: usize,
        address: u64,
        content: *const u8,
        bytes: u64,
    ) -> Result<bool, MissingPagesError> {
        self.kernel.copy(address, content, bytes).map_err(self.failed("UFFDIO_COPY", block))
    }

    fn checked(&self, block: usize, first: u64, count: u64) -> Result<Range<u64>, MissingPagesError> {
        checked(&self.ram, block, first, count)
    }

    fn failed(&self, call: &'static str, block: usize) -> impl FnOnce(std::io::Error) -> MissingPagesError {
        let block = self.ram.block(block).name().to_owned();
        move |source| MissingPagesError::Block { block, call, source }
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        if self.is_registered.load(Ordering::Acquire) {
            LEFT.lock().push(Arc::clone(&self.kernel));
        }
    }
}

fn unsupported(Unsupported { is_feature, source }: Unsupported) -> MissingPagesError {
    let what = if is_feature {
        "UFFD_FEATURE_MISSING_SHMEM and UFFD_FEATURE_MISSING_HUGETLBFS"
    } else {
        "userfaultfd(2) for page faults of the kernel"
    };
    MissingPagesError::Unsupported { what, source }
}

/// The addresses of these pages, which are whole pages of the memory below.
fn checked(ram: &GuestRam, block: usize, first: u64, count: u64) -> Result<Range<u64>, MissingPagesError> {
    let outside = || MissingPagesError::Outside { block, first, count };
    let found = ram.blocks().get(block).ok_or_else(outside)?;
    found.check_pages(first, count).map_err(|_| outside())?;
    let unit = found.page_bytes() >> PAGE_SHIFT;
    if count == 0 || !first.is_multiple_of(unit) || !count.is_multiple_of(unit) {
        return Err(outside());
    }
    Ok(bytes_of(found, first, count))
}

fn check(block: &RamBlock) -> Result<(), MissingPagesError> {
    let address = block.host_address() as u64;
    let rule = if block.mapped_bytes() == 0 {
        Some("it has no memory")
    } else if block.is_gone() {
        Some("another process has its memory")
    } else if block.is_read_only() {
        Some("it cannot be written by way of this mapping")
    } else if !block.permissions().userfaultfd {
        Some("its VMM does not permit the engine to register it with userfaultfd (MemoryPermissions)")
    } else if !block.permissions().discard {
        Some("its VMM does not permit the engine to give its memory back (MemoryPermissions)")
    } else if !matches!(
        block.mapping.kind(),
        Kind::Anonymous | Kind::SharedAnonymous | Kind::Tmpfs | Kind::Hugetlbfs
    ) {
        Some("it is a file on a disk, or a private copy of a file")
    } else if !address.is_multiple_of(block.page_bytes())
        || !block.len_bytes().is_multiple_of(block.page_bytes())
    {
        Some("it begins or ends inside of a huge page")
    } else {
        None
    };
    match rule {
        Some(rule) => Err(MissingPagesError::Refused { block: block.name().to_owned(), rule }),
        None => Ok(()),
    }
}

fn bytes_of(block: &RamBlock, first: u64, count: u64) -> Range<u64> {
    let start = block.host_address() as u64 + (first << PAGE_SHIFT);
    start..start + (count << PAGE_SHIFT)
}
