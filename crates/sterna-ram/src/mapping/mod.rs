//! One mapping of this process: memory that the engine mapped, or memory of the VMM.

pub(crate) mod kind;
mod own;
mod pins;
mod replaced;

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::filling::Filled;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::permissions::MemoryPermissions;
use crate::sys::{self, check};
pub(crate) use kind::Kind;
use parking_lot::Mutex;
use pins::Pins;

/// The kind of memory that the engine maps for a block ([`RamBlock::new`](crate::RamBlock::new)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// A memfd, mapped shared: another process can map it, too (vhost-user).
    Memfd,
    /// Private anonymous memory, which cannot be handed to another process.
    Anonymous,
    /// A memfd on huge pages of 2 MiB, which the host must have reserved.
    Huge2M,
    /// A memfd on huge pages of 1 GiB, which the host must have reserved.
    Huge1G,
}

impl Backing {
    /// Returns the page size of the backing in bytes, the smallest unit of allocation.
    pub fn unit_bytes(self) -> u64 {
        match self {
            Backing::Memfd | Backing::Anonymous => PAGE_BYTES,
            Backing::Huge2M => 2 << 20,
            Backing::Huge1G => 1 << 30,
        }
    }

    /// Whether the memory is on reserved huge pages.
    pub fn is_huge(self) -> bool {
        matches!(self, Backing::Huge2M | Backing::Huge1G)
    }

    fn kind(self) -> Kind {
        match self {
            Backing::Anonymous => Kind::Anonymous,
            Backing::Memfd => Kind::Tmpfs,
            Backing::Huge2M | Backing::Huge1G => Kind::Hugetlbfs,
        }
    }
}

/// The file of a mapping, and the offset at which the mapping begins.
#[derive(Debug, Clone)]
pub(crate) struct FileRange {
    pub file: Arc<File>,
    pub offset: u64,
}

/// The kind and the file of a mapping's memory.
#[derive(Debug, Clone)]
pub(crate) struct Under {
    pub kind: Kind,
    pub file: Option<FileRange>,
}

/// The party that unmaps the memory.
pub(crate) enum Owner {
    /// No party: there is no memory.
    Nobody,
    /// This mapping unmaps it when it is dropped.
    Mapping,
    /// The VMM unmaps it, after the last clone of this owner is dropped.
    External(Arc<dyn Any + Send + Sync>),
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Nobody => f.write_str("Nobody"),
            Owner::Mapping => f.write_str("Mapping"),
            Owner::External(owner) => write!(f, "External(held {} times)", Arc::strong_count(owner)),
        }
    }
}

/// A mapped range of addresses and the properties of its memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(super) address: *mut u8,
    pub(super) len: usize,
    /// Bytes in the smallest unit that the kernel allocates and frees.
    pub(super) page_bytes: u64,
    /// Changes when memory is taken over from another process, or handed to one ([`super::descriptors`]).
    pub(super) under: Mutex<Under>,
    /// Changes together with [`Mapping::under`].
    pub(super) is_read_only: AtomicBool,
    /// Whether another process has the memory and this mapping has no other.
    pub(super) is_gone: AtomicBool,
    /// Whether a userfaultfd of the VMM fills missing pages when they are first touched.
    pub(super) is_filled_on_demand: bool,
    /// The server of this process that fills missing pages.
    pub(crate) filled: Filled,
    pub(super) permissions: MemoryPermissions,
    pub(super) owner: Owner,
    /// Other mappings of the same file in the same guest: see [`Mapping::link`].
    pub(super) siblings: Mutex<Vec<Weak<Mapping>>>,
    /// Byte ranges whose pages must not be given back.
    pub(crate) pins: Mutex<Pins>,
}

// SAFETY: the mapping belongs to the process, not to a thread. All access uses raw pointers with volatile or
// atomic operations, and the address never changes until drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared use hands out raw pointers only.
unsafe impl Sync for Mapping {}

// A panic leaves no inconsistent state: the mapping does not change, and the owner's value is not used.
impl UnwindSafe for Mapping {}
impl RefUnwindSafe for Mapping {}

impl Mapping {
    /// Maps `len` bytes, a positive multiple of the backing's unit. The error names the failed call.
    pub(crate) fn new(name: &str, len: usize, backing: Backing) -> Result<Self, (&'static str, io::Error)> {
        let file = match backing {
            Backing::Anonymous => None,
            _ => Some(own::memfd(name, len, backing)?),
        };
        let address = own::map(len, backing, file.as_ref()).map_err(|error| ("mmap", error))?;
        Ok(Mapping {
            address,
            len,
            page_bytes: backing.unit_bytes(),
            under: Mutex::new(Under {
                kind: backing.kind(),
                file: file.map(|file| FileRange { file: Arc::new(file), offset: 0 }),
            }),
            is_read_only: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            is_filled_on_demand: false,
            filled: Filled::default(),
            permissions: MemoryPermissions::all(),
            owner: Owner::Mapping,
            siblings: Mutex::default(),
            pins: Mutex::default(),
        })
    }

    /// Maps the first `len` bytes of `file`, shared. `len` is a positive multiple of `page_bytes`, and at most
    /// the file's length.
    ///
    /// The error names the failed call.
    pub(crate) fn of_file(
        len: usize,
        file: File,
        kind: Kind,
        page_bytes: u64,
    ) -> Result<Self, (&'static str, io::Error)> {
        let address = own::map(len, Backing::Memfd, Some(&file)).map_err(|error| ("mmap", error))?;
        let mut mapping = Mapping::none();
        (mapping.address, mapping.len, mapping.owner) = (address, len, Owner::Mapping);
        mapping.page_bytes = page_bytes;
        let file = Some(FileRange { file: Arc::new(file), offset: 0 });
        mapping.under = Mutex::new(Under { kind, file });
        Ok(mapping)
    }

    /// Reserves `len` bytes of addresses, aligned for the backing's pages. Memory of that kind arrives later.
    pub(crate) fn awaiting(len: usize, backing: Backing) -> Result<Self, (&'static str, io::Error)> {
        let address = own::reserve(len, backing).map_err(|error| ("mmap", error))?;
        let mut mapping = Mapping::none();
        (mapping.address, mapping.len, mapping.owner) = (address, len, Owner::Mapping);
        mapping.page_bytes = backing.unit_bytes();
        mapping.under = Mutex::new(Under { kind: backing.kind(), file: None });
        mapping.is_gone = AtomicBool::new(true);
        Ok(mapping)
    }

    /// Makes a mapping without memory.
    pub(crate) fn none() -> Self {
        Mapping {
            address: ptr::null_mut(),
            len: 0,
            page_bytes: PAGE_BYTES,
            under: Mutex::new(Under { kind: Kind::Anonymous, file: None }),
            is_read_only: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            is_filled_on_demand: false,
            filled: Filled::default(),
            permissions: MemoryPermissions::all(),
            owner: Owner::Nobody,
            siblings: Mutex::default(),
            pins: Mutex::default(),
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Returns the number of mapped bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    pub(crate) fn kind(&self) -> Kind {
        self.under.lock().kind
    }

    pub(crate) fn file(&self) -> Option<FileRange> {
        self.under.lock().file.clone()
    }

    /// Returns kind and file from one lock, so that they match.
    pub(crate) fn under(&self) -> Under {
        self.under.lock().clone()
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Acquire)
    }

    /// Whether another process has the memory and this mapping has no other.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Whether a userfaultfd of the VMM fills missing pages with content.
    pub(crate) fn is_filled_on_demand(&self) -> bool {
        self.is_filled_on_demand
    }

    pub(crate) fn permissions(&self) -> MemoryPermissions {
        self.permissions
    }

    /// Whether the pages of the memory are larger than [`PAGE_BYTES`].
    pub(crate) fn is_huge(&self) -> bool {
        self.page_bytes > PAGE_BYTES
    }

    /// Records for each mapping which others are parts of the same file on hugetlbfs.
    ///
    /// The kernel counts the allocated bytes of such a file only as a whole.
    pub(crate) fn link(all: &[Arc<Mapping>]) {
        let files: Vec<_> = all.iter().map(|mapping| mapping.huge_file()).collect();
        for (mapping, file) in all.iter().zip(&files).filter(|(_, file)| file.is_some()) {
            let is_other = |other: &&Arc<Mapping>| !Arc::ptr_eq(other, mapping);
            let same = all.iter().zip(&files).filter(|(_, other)| *other == file).map(|(other, _)| other);
            *mapping.siblings.lock() = same.filter(is_other).map(Arc::downgrade).collect();
        }
    }

    /// Returns device and inode of the mapping's file, if it is on hugetlbfs.
    fn huge_file(&self) -> Option<(u64, u64)> {
        let Under { kind, file } = self.under();
        let range = file.filter(|_| kind == Kind::Hugetlbfs)?;
        range.file.metadata().ok().map(|status| (status.dev(), status.ino()))
    }

    /// Returns the other mappings of the same file in the same guest that still exist.
    pub(crate) fn siblings(&self) -> Vec<Arc<Mapping>> {
        self.siblings.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Calls `madvise` on bytes `[offset, offset + len)`, which must be inside the mapping.
    pub(crate) fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let (offset, len) = (offset as usize, len as usize);
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        loop {
            // SAFETY: the range is inside this mapping (asserted). No Rust reference to its bytes exists, so no
            // effect of the advice on its content violates a rule of the language.
            let result = unsafe { libc::madvise(self.address.add(offset).cast(), len, advice) };
            match check(libc::c_long::from(result)) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The reason if the page at byte `offset` is a hole of its file, and the file system has no space left. Changes nothing.
    ///
    /// A signal does not tell this from poisoned memory: SIGBUS has the code BUS_ADRERR for a full file system and for a file that
    /// became shorter, and a system call that meets the page fails with EFAULT for poisoned memory, too. Private mappings never
    /// need space of their file. A page that a VMM fills on demand, and a huge page, are missing for other reasons.
    pub(crate) fn lacks_space(&self, offset: u64) -> Option<io::Error> {
        let Under { kind, file } = self.under();
        let is_filled = self.is_filled_on_demand || self.filled.is_active();
        let range = file.filter(|_| matches!(kind, Kind::Tmpfs | Kind::File) && !is_filled)?;
        let lacks = sys::is_hole(&range.file, range.offset + offset, PAGE_BYTES)
            .and_then(|is_hole| Ok(is_hole && sys::is_full(&range.file)?));
        lacks.unwrap_or(false).then(|| io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// Gives the memory of `[offset, offset + len)` back to the kernel. It reads as zero afterwards.
    ///
    /// This is the only function that gives memory back. The range must consist of whole pages of
    /// [`Mapping::page_bytes`], and the owner must permit it. Pinned bytes are refused. If a call fails, the
    /// bytes are undefined.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> Result<(), NotDiscarded> {
        assert!(self.permissions.discard, "the caller has checked the permission to discard");
        if len == 0 {
            return Ok(());
        }
        // The lock is kept until the end, so that a later pin applies to the pages after the discard.
        let pins = self.pins.lock();
        if let Some(pinned) = pins.first_in(offset..offset + len) {
            return Err(NotDiscarded::Pinned { offset: pinned.start, len: pinned.end - pinned.start });
        }
        // Every change of `under` and `is_read_only` holds the lock of the pins, too.
        if self.is_read_only() {
            return Err(NotDiscarded::ReadOnly);
        }
        self.filled.given_back(offset >> PAGE_SHIFT, len >> PAGE_SHIFT);
        self.discard_unpinned(offset, len).map_err(|(call, source)| NotDiscarded::System(call, source))
    }

    fn discard_unpinned(&self, offset: u64, len: u64) -> Result<(), (&'static str, io::Error)> {
        let Under { kind, file } = self.under();
        match (kind, &file) {
            (Kind::Anonymous, _) => match self.advise(offset, len, libc::MADV_DONTNEED) {
                // The kernel returns EINVAL for locked memory. Linux 5.18 has a separate advice for it.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self
                    .advise(offset, len, libc::MADV_DONTNEED_LOCKED)
                    .map_err(|_| ("madvise(MADV_DONTNEED)", error)),
                done => done.map_err(|error| ("madvise(MADV_DONTNEED)", error)),
            },
            (Kind::SharedAnonymous, _) | (_, None) => {
                self.advise(offset, len, libc::MADV_REMOVE).map_err(|error| ("madvise(MADV_REMOVE)", error))
            }
            (_, Some(range)) => punch_hole(range, offset, len),
        }
    }
}

/// The reason why memory was not given back.
#[derive(Debug)]
pub(crate) enum NotDiscarded {
    /// These bytes are pinned. No memory was given back.
    Pinned { offset: u64, len: u64 },
    /// The memory is read-only. No memory was given back.
    ReadOnly,
    /// This system call failed; a part may have been given back.
    System(&'static str, io::Error),
}

fn punch_hole(range: &FileRange, offset: u64, len: u64) -> Result<(), (&'static str, io::Error)> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let from = (range.offset + offset) as libc::off_t;
    loop {
        // SAFETY: no pointers are passed; no Rust reference names the bytes that the file loses.
        let result = unsafe { libc::fallocate(range.file.as_raw_fd(), mode, from, len as libc::off_t) };
        match check(libc::c_long::from(result)) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(("fallocate(PUNCH_HOLE)", error)),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Mapping) {
            return;
        }
        // SAFETY: we own exactly this mapping. RamSlices borrow the block, and holders of the raw
        // address promised to keep the block alive (RamBlock::host_address).
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}
