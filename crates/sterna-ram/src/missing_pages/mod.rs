//! Guest RAM whose pages arrive while the guest runs (postcopy), by userfaultfd for missing pages.
//!
//! A thread that touches a missing page blocks until the page is placed. This applies to the threads of this
//! process, if they use the block's own mapping. It also applies to the kernel on their behalf (KVM for a vCPU,
//! `read(2)` into guest RAM). It does not apply to
//!
//! - another mapping of the same memory: another process's (vhost-user, vfio-user), or a second one of this
//!   process;
//! - a device that has pinned the memory (VFIO), because its pages are populated already.
//!
//! A VM with such a mapping or device cannot use missing pages. The caller must check for them and refuse it.
//!
//! The caller of [`MissingPages::register`] must resolve every fault: [`MissingPages::wait`] reports faults,
//! [`MissingPages::place`] and [`MissingPages::place_zeros`] resolve them. After [`MissingPages::end`], no
//! access blocks any more, and a page that is still missing reads as zero. **That must not happen while the
//! guest runs.** Dropping therefore does not end the registration. The memory stays registered until the
//! process ends, and an access to a missing page blocks until then.
//!
//! A page is placed atomically: no thread sees a part of it. On huge pages, a whole huge page is placed.

mod addresses;
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

use crate::mapping::Backing;
use crate::mapping::kind::Kind;
use crate::page::{PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE};
use crate::userfault::{self, FillEnd, Filled, Stop, Unsupported, Userfault};
use crate::{GuestRam, RamBlock};
use addresses::{bytes_of, checked};

pub(crate) const FEATURES: u32 =
    UFFD_FEATURE_MISSING_HUGETLBFS | UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_THREAD_ID;

/// Registrations that were dropped with missing pages. If their descriptors were closed, the guest would read
/// zeros.
static LEFT: Mutex<Vec<Arc<Userfault>>> = Mutex::new(Vec::new());

/// A thread that blocks on a missing page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fault {
    /// Index of the block.
    pub block: usize,
    /// The first of the missing pages. Together they are one page of the backing.
    pub first: u64,
    /// Number of pages of [`PAGE_SIZE`], see [`Fault::first`].
    pub count: u64,
    /// The id of the blocked thread (`gettid(2)`).
    pub thread: u32,
}

/// The number of placed pages, and why placing stopped.
///
/// The kernel places page after page, so a call can fail after it placed some of its pages. A thread may have
/// read the placed pages, so they must not be placed again.
#[derive(Debug)]
#[must_use = "pages that are in place must be recorded, also if the page after them failed"]
pub struct Placed {
    /// Number of placed pages, counted from the first page of the call.
    pub pages: u64,
    /// The reason why the following page was not placed. `None`: all pages were placed.
    pub end: Option<PlacedEnd>,
}

/// Why a page was not placed.
#[derive(Debug)]
pub enum PlacedEnd {
    /// The page was not missing.
    Occupied,
    /// A local error, for example no free memory on the host.
    Failed(MissingPagesError),
}

impl Placed {
    fn none(error: MissingPagesError) -> Self {
        Self { pages: 0, end: Some(PlacedEnd::Failed(error)) }
    }
}

/// The registration of guest RAM whose missing pages block the threads that touch them.
#[derive(Debug)]
pub struct MissingPages {
    ram: GuestRam,
    kernel: Arc<Userfault>,
    stop: Stop,
    /// Address range and block index of each block; ordered by address.
    places: Vec<(Range<u64>, usize)>,
    /// Zeros for one page of the largest huge-page backing. They are never written, so they take no memory.
    zeros: Option<RamBlock>,
    is_registered: AtomicBool,
}

impl MissingPages {
    /// Checks whether this host and this process can use missing pages, independent of the memory.
    ///
    /// # Errors
    /// [`MissingPagesError::Unsupported`].
    pub fn probe() -> Result<(), MissingPagesError> {
        Userfault::open(FEATURES).map(drop).map_err(unsupported)
    }

    /// Checks whether all memory of `ram` supports missing pages. The call changes nothing.
    ///
    /// # Errors
    /// [`MissingPagesError::Refused`], for the first block that does not.
    pub fn check(ram: &GuestRam) -> Result<(), MissingPagesError> {
        ram.blocks().iter().try_for_each(check)
    }

    /// Opens the userfaultfd. No memory is registered yet.
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

    /// Registers all blocks: from now on, an access to a missing page blocks.
    ///
    /// If the call fails, no access blocks.
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

    /// Discards pages, whatever they contain, so that they are missing. The range must consist of whole pages
    /// of the backing.
    ///
    /// # Errors
    /// [`MissingPagesError::Discard`], [`MissingPagesError::Outside`].
    pub fn take_away(&self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        self.checked(block, first, count)?;
        Ok(self.ram.block(block).discard_pages(first, count)?)
    }

    /// Places missing pages and wakes the threads that wait for them. The range must consist of whole pages of
    /// the backing.
    pub fn place(&self, block: usize, first: u64, content: &[u8]) -> Placed {
        match self.checked(block, first, (content.len() / PAGE_SIZE) as u64) {
            Ok(bytes) => self.copy(block, bytes.start, content.as_ptr(), content.len() as u64),
            Err(error) => Placed::none(error),
        }
    }

    /// Places a huge page whose content was assembled in `content`, like [`MissingPages::place`].
    pub fn place_block(&self, block: usize, first: u64, content: &RamBlock) -> Placed {
        // On a page fault in `content`, the kernel retries through one more huge page, and none may be free.
        let readable = || content.populate_to_read().map_err(MissingPagesError::Staging);
        match self.checked(block, first, content.pages()).and_then(|bytes| readable().map(|()| bytes)) {
            Ok(bytes) => self.copy(block, bytes.start, content.host_address(), content.len_bytes()),
            Err(error) => Placed::none(error),
        }
    }

    /// Places zero pages, like [`MissingPages::place`].
    pub fn place_zeros(&self, block: usize, first: u64, count: u64) -> Placed {
        let bytes = match self.checked(block, first, count) {
            Ok(bytes) => bytes,
            Err(error) => return Placed::none(error),
        };
        let unit = self.ram.block(block).page_bytes();
        if unit == PAGE_BYTES {
            return self.placed("UFFDIO_ZEROPAGE", block, self.kernel.zero(&bytes));
        }
        let Some(zeros) = &self.zeros else { return Placed { pages: count, end: None } };
        if let Err(error) = zeros.populate_to_read() {
            return Placed::none(MissingPagesError::Staging(error));
        }
        let mut pages = 0;
        for start in bytes.step_by(unit as usize) {
            let Placed { pages: more, end } = self.copy(block, start, zeros.host_address(), unit);
            pages += more;
            if end.is_some() {
                return Placed { pages, end };
            }
        }
        Placed { pages, end: None }
    }

    /// Wakes the threads that wait for these pages, so that they repeat their access.
    ///
    /// # Errors
    /// [`MissingPagesError`].
    pub fn wake(&self, block: usize, first: u64, count: u64) -> Result<(), MissingPagesError> {
        let bytes = self.checked(block, first, count)?;
        self.kernel.wake(&bytes).map_err(self.failed("UFFDIO_WAKE", block))
    }

    /// Waits for faults and appends them to `faults`. Several threads may wait for the same page.
    ///
    /// Returns `false` after [`MissingPages::stop_waiting`].
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

    /// Makes the current or the next call of [`MissingPages::wait`] return `false`.
    pub fn stop_waiting(&self) {
        self.stop.set();
    }

    /// Ends the registration: no access blocks any more.
    ///
    /// Call it when all pages are placed, or when no guest runs that would read zeros from missing pages.
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

    fn copy(&self, block: usize, address: u64, content: *const u8, bytes: u64) -> Placed {
        self.placed("UFFDIO_COPY", block, self.kernel.copy(address, content, bytes))
    }

    fn placed(&self, call: &'static str, block: usize, Filled { bytes, end }: Filled) -> Placed {
        let end = end.map(|end| match end {
            FillEnd::Occupied => PlacedEnd::Occupied,
            FillEnd::Failed(error) => PlacedEnd::Failed(self.failed(call, block)(error)),
        });
        Placed { pages: bytes >> PAGE_SHIFT, end }
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

pub(crate) fn unsupported(Unsupported { is_feature, source }: Unsupported) -> MissingPagesError {
    let what = if is_feature {
        "UFFD_FEATURE_MISSING_SHMEM and UFFD_FEATURE_MISSING_HUGETLBFS"
    } else {
        "userfaultfd(2) for page faults of the kernel"
    };
    MissingPagesError::Unsupported { what, source }
}

fn check(block: &RamBlock) -> Result<(), MissingPagesError> {
    let address = block.host_address() as u64;
    let rule = if block.mapped_bytes() == 0 {
        Some("it has no memory")
    } else if block.is_gone() {
        Some("another process has its memory")
    } else if block.is_read_only() {
        Some("it cannot be written through this mapping")
    } else if !block.permissions().userfaultfd {
        Some("its VMM does not permit the engine to register it with userfaultfd (MemoryPermissions)")
    } else if !block.permissions().discard {
        Some("its VMM does not permit the engine to release its memory (MemoryPermissions)")
    } else if !matches!(
        block.mapping.kind(),
        Kind::Anonymous | Kind::SharedAnonymous | Kind::Tmpfs | Kind::Hugetlbfs
    ) {
        Some("it is a file on a disk, or a private copy of a file")
    } else if !address.is_multiple_of(block.page_bytes())
        || !block.len_bytes().is_multiple_of(block.page_bytes())
    {
        Some("it begins or ends inside a huge page")
    } else {
        None
    };
    match rule {
        Some(rule) => Err(MissingPagesError::Refused { block: block.name().to_owned(), rule }),
        None => Ok(()),
    }
}
