//! One mapping of this process: the engine's own, or memory that the VMM mapped.

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

use crate::sys::check;
use crate::{MemoryPermissions, PAGE_BYTES};
use parking_lot::Mutex;
use pins::Pins;

/// What the memory of a block is made of that the engine maps itself ([`RamBlock::new`](crate::RamBlock::new)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// A memfd, mapped shared: can be handed to another process (vhost-user).
    Memfd,
    /// Private anonymous memory.
    Anonymous,
    /// A memfd on huge pages of 2 MiB, which the host must have reserved.
    Huge2M,
    /// A memfd on huge pages of 1 GiB, which the host must have reserved.
    Huge1G,
}

impl Backing {
    /// Bytes in the smallest piece that this backing gives and takes.
    pub fn unit_bytes(self) -> u64 {
        match self {
            Backing::Memfd | Backing::Anonymous => PAGE_BYTES,
            Backing::Huge2M => 2 << 20,
            Backing::Huge1G => 1 << 30,
        }
    }

    /// Whether the memory lies on reserved huge pages.
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

/// How a mapping gets its memory, which decides how memory is given back and who knows which pages are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Private, without a file.
    Anonymous,
    /// Shared, without a file.
    SharedAnonymous,
    /// Shared, of a file on tmpfs (a memfd is one).
    Tmpfs,
    /// Shared, of a file on hugetlbfs.
    Hugetlbfs,
    /// Shared, of a file elsewhere.
    File,
    /// Private, of a file on tmpfs.
    PrivateTmpfs,
    /// Private, of a file elsewhere.
    PrivateFile,
}

impl Kind {
    /// Whether writes reach whoever else has the memory.
    pub(crate) fn is_shared(self) -> bool {
        !matches!(self, Kind::Anonymous | Kind::PrivateTmpfs | Kind::PrivateFile)
    }

    /// Whether a page that is given back reads as zero afterwards. A private page of a file reads as the file.
    pub(crate) fn is_zero_when_discarded(self) -> bool {
        !matches!(self, Kind::PrivateTmpfs | Kind::PrivateFile)
    }
}

/// The file of a mapping, and where in it the mapping begins.
#[derive(Debug, Clone)]
pub(crate) struct FileRange {
    pub file: Arc<File>,
    pub offset: u64,
}

/// What the memory of a mapping is.
#[derive(Debug, Clone)]
pub(crate) struct Under {
    pub kind: Kind,
    pub file: Option<FileRange>,
}

/// Who unmaps the memory.
pub(crate) enum Owner {
    /// There is no memory.
    Nobody,
    /// This mapping, when it is dropped.
    Mapping,
    /// Whoever this keeps alive.
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

/// A live mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(super) address: *mut u8,
    pub(super) len: usize,
    /// Bytes in the smallest piece that the kernel gives and takes.
    pub(super) page_bytes: u64,
    /// Changes when memory is taken over from another process, or given to one ([`super::descriptors`]).
    pub(super) under: Mutex<Under>,
    /// As [`Mapping::under`].
    pub(super) is_read_only: AtomicBool,
    /// Another process has the memory, and none has come in its stead.
    pub(super) is_gone: AtomicBool,
    /// A page that is not there is filled by somebody when it is touched first.
    pub(super) is_filled_on_demand: bool,
    pub(super) permissions: MemoryPermissions,
    pub(super) owner: Owner,
    /// Other mappings of the same file in the same guest: see [`Mapping::link`].
    pub(super) siblings: Mutex<Vec<Weak<Mapping>>>,
    /// Bytes whose pages must not be given back.
    pub(crate) pins: Mutex<Pins>,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through raw pointers
// with volatile or atomic operations, and the address never changes until drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared use hands out raw pointers only.
unsafe impl Sync for Mapping {}

// A panic leaves nothing half changed: the mapping never changes, and of the owner nothing is used.
impl UnwindSafe for Mapping {}
impl RefUnwindSafe for Mapping {}

impl Mapping {
    /// Maps `len` bytes (a multiple of the backing's unit, above 0). On failure says which call failed.
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
            permissions: MemoryPermissions::all(),
            owner: Owner::Mapping,
            siblings: Mutex::default(),
            pins: Mutex::default(),
        })
    }

    /// Maps the first `len` bytes (a multiple of `page_bytes`, above 0) of `file`, which has them, shared. On failure says which
    /// call failed.
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

    /// `len` bytes of addresses, aligned for the backing's pages, to which memory of that kind comes later.
    pub(crate) fn awaiting(len: usize, backing: Backing) -> Result<Self, (&'static str, io::Error)> {
        let address = own::reserve(len, backing).map_err(|error| ("mmap", error))?;
        let mut mapping = Mapping::none();
        (mapping.address, mapping.len, mapping.owner) = (address, len, Owner::Mapping);
        mapping.page_bytes = backing.unit_bytes();
        mapping.under = Mutex::new(Under { kind: backing.kind(), file: None });
        mapping.is_gone = AtomicBool::new(true);
        Ok(mapping)
    }

    /// No memory at all.
    pub(crate) fn none() -> Self {
        Mapping {
            address: ptr::null_mut(),
            len: 0,
            page_bytes: PAGE_BYTES,
            under: Mutex::new(Under { kind: Kind::Anonymous, file: None }),
            is_read_only: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            is_filled_on_demand: false,
            permissions: MemoryPermissions::all(),
            owner: Owner::Nobody,
            siblings: Mutex::default(),
            pins: Mutex::default(),
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Bytes that are mapped.
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

    /// Both at one moment.
    pub(crate) fn under(&self) -> Under {
        self.under.lock().clone()
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Acquire)
    }

    /// Whether another process has the memory, and none has come in its stead.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Whether a page that is not there may hold bytes anyway.
    pub(crate) fn is_filled_on_demand(&self) -> bool {
        self.is_filled_on_demand
    }

    pub(crate) fn permissions(&self) -> MemoryPermissions {
        self.permissions
    }

    /// Whether the mapping's memory comes in pieces larger than a page.
    pub(crate) fn is_huge(&self) -> bool {
        self.page_bytes > PAGE_BYTES
    }

    /// Tells the mappings of a guest which of them are parts of one file on hugetlbfs: what such a file holds can only be
    /// counted for the whole of it.
    pub(crate) fn link(all: &[Arc<Mapping>]) {
        let files: Vec<_> = all.iter().map(|mapping| mapping.huge_file()).collect();
        for (mapping, file) in all.iter().zip(&files).filter(|(_, file)| file.is_some()) {
            let is_other = |other: &&Arc<Mapping>| !Arc::ptr_eq(other, mapping);
            let same = all.iter().zip(&files).filter(|(_, other)| *other == file).map(|(other, _)| other);
            *mapping.siblings.lock() = same.filter(is_other).map(Arc::downgrade).collect();
        }
    }

    /// Device and inode of the file on hugetlbfs of which this is a part.
    fn huge_file(&self) -> Option<(u64, u64)> {
        let Under { kind, file } = self.under();
        let range = file.filter(|_| kind == Kind::Hugetlbfs)?;
        range.file.metadata().ok().map(|status| (status.dev(), status.ino()))
    }

    /// The other mappings of the same file in the same guest, as far as they are still there.
    pub(crate) fn siblings(&self) -> Vec<Arc<Mapping>> {
        self.siblings.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// `madvise` on bytes `[offset, offset + len)`, which must lie inside the mapping.
    pub(crate) fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let (offset, len) = (offset as usize, len as usize);
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        loop {
            // SAFETY: the range lies inside this mapping (asserted), over which no Rust reference
            // exists, so whatever the advice does to its contents breaks no rule of the language.
            let result = unsafe { libc::madvise(self.address.add(offset).cast(), len, advice) };
            match check(libc::c_long::from(result)) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives the memory of bytes `[offset, offset + len)` back; they read as zero afterwards. Whole pages of
    /// [`Mapping::page_bytes`] only, only where the owner permits it, and nothing that is pinned: the one place that gives
    /// memory back. If a call fails, the bytes are then anything.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> Result<(), NotDiscarded> {
        assert!(self.permissions.discard, "whoever discards has asked for the permission");
        if len == 0 {
            return Ok(());
        }
        // Until it is done: what is pinned afterwards is pinned as it is then.
        let pins = self.pins.lock();
        if let Some(pinned) = pins.first_in(offset..offset + len) {
            return Err(NotDiscarded::Pinned { offset: pinned.start, len: pinned.end - pinned.start });
        }
        // Whoever changes what the memory is holds the pins, too.
        if self.is_read_only() {
            return Err(NotDiscarded::ReadOnly);
        }
        self.discard_unpinned(offset, len).map_err(|(call, source)| NotDiscarded::System(call, source))
    }

    fn discard_unpinned(&self, offset: u64, len: u64) -> Result<(), (&'static str, io::Error)> {
        let Under { kind, file } = self.under();
        match (kind, &file) {
            (Kind::Anonymous, _) => match self.advise(offset, len, libc::MADV_DONTNEED) {
                // What a locked mapping says. Linux 5.18 has an advice of its own for those.
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

/// Why memory was not given back.
#[derive(Debug)]
pub(crate) enum NotDiscarded {
    /// These bytes are pinned. Nothing was given back.
    Pinned { offset: u64, len: u64 },
    /// The memory cannot be written. Nothing was given back.
    ReadOnly,
    /// This call failed.
    System(&'static str, io::Error),
}

fn punch_hole(range: &FileRange, offset: u64, len: u64) -> Result<(), (&'static str, io::Error)> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let from = (range.offset + offset) as libc::off_t;
    loop {
        // SAFETY: no pointers are passed; what the file loses no Rust reference names.
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
