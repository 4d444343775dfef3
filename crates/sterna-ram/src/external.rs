//! Blocks over memory that the VMM mapped, and the engine's permissions for it.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use super::permissions::MemoryPermissions;
use crate::block::RamBlock;
use crate::error::RamError;
use crate::filling::Filled;
use crate::mapping::kind::Kind;
use crate::mapping::{FileRange, Mapping, Owner, Under};
use crate::page::PAGE_BYTES;
use crate::sys::{self, FileSystem};

/// A description of memory that the VMM mapped, for [`RamBlock::from_external`].
///
/// [`ExternalMemory::new`] describes private, writable memory on normal pages, without a file and without
/// permissions for the engine.
#[derive(Clone)]
pub struct ExternalMemory {
    address: *mut u8,
    len_bytes: u64,
    owner: Arc<dyn Any + Send + Sync>,
    file: Option<FileRange>,
    is_shared: bool,
    huge_page_bytes: Option<u64>,
    is_read_only: bool,
    is_filled_on_demand: bool,
    is_fresh: bool,
    permissions: MemoryPermissions,
}

impl ExternalMemory {
    /// Describes `len_bytes` bytes from `address` on; both must be multiples of 4 KiB.
    ///
    /// The block keeps `owner` until the block and all its clones are dropped. The memory must stay mapped
    /// while the owner lives.
    pub fn new(address: *mut u8, len_bytes: u64, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            address,
            len_bytes,
            owner,
            file: None,
            is_shared: false,
            huge_page_bytes: None,
            is_read_only: false,
            is_filled_on_demand: false,
            is_fresh: false,
            permissions: MemoryPermissions::none(),
        }
    }

    /// States that the memory is mapped `MAP_SHARED`.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.is_shared = true;
        self
    }

    /// States that the memory is `file` from byte `offset` on.
    ///
    /// The file may be a memfd, a file on tmpfs or hugetlbfs, or any other file.
    #[must_use]
    pub fn file(mut self, file: Arc<File>, offset: u64) -> Self {
        self.file = Some(FileRange { file, offset });
        self
    }

    /// States that the memory is on huge pages of `bytes` bytes.
    ///
    /// Call it only for memory without a file (`MAP_HUGETLB`). For a file, the engine asks the kernel.
    #[must_use]
    pub fn huge_pages(mut self, bytes: u64) -> Self {
        self.huge_page_bytes = Some(bytes);
        self
    }

    /// States that the mapping is read-only (no `PROT_WRITE`).
    ///
    /// A source reads it. A destination compares it with the received pages, and fails the migration if they
    /// differ.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.is_read_only = true;
        self
    }

    /// States that a missing page is filled when it is first touched.
    ///
    /// That is the case if the VMM registered the memory with a userfaultfd for missing pages (a snapshot that
    /// is restored lazily). The engine then reads every page that it sends, and does not look for absent pages.
    #[must_use]
    pub fn filled_on_demand(mut self) -> Self {
        self.is_filled_on_demand = true;
        self
    }

    /// States that the memory is fresh: see [`RamBlock::declare_fresh`].
    #[must_use]
    pub fn fresh(mut self) -> Self {
        self.is_fresh = true;
        self
    }

    /// Sets the operations that the engine may do on the memory.
    #[must_use]
    pub fn permit(mut self, permissions: MemoryPermissions) -> Self {
        self.permissions = permissions;
        self
    }

    fn kind(&self, system: FileSystem) -> Kind {
        match (&self.file, self.is_shared, system) {
            (None, false, _) => Kind::Anonymous,
            (None, true, _) => Kind::SharedAnonymous,
            (Some(_), true, FileSystem::Tmpfs) => Kind::Tmpfs,
            (Some(_), true, FileSystem::Hugetlbfs { .. }) => Kind::Hugetlbfs,
            (Some(_), true, FileSystem::Other) => Kind::File,
            (Some(_), false, FileSystem::Tmpfs) => Kind::PrivateTmpfs,
            (Some(_), false, _) => Kind::PrivateFile,
        }
    }

    /// Returns the first contradiction in the description, as text.
    fn misfit(&self, kind: Kind, page_bytes: u64) -> Option<&'static str> {
        let address = self.address as u64;
        let offset = self.file.as_ref().map_or(address, |range| range.offset);
        Some(match () {
            () if self.address.is_null() => "its address is null",
            () if !address.is_multiple_of(PAGE_BYTES) => "its address is not a multiple of 4096",
            () if address.checked_add(self.len_bytes).is_none() => "it ends after the last address",
            () if offset.checked_add(self.len_bytes).is_none() => {
                "it ends after the largest possible offset in a file"
            }
            () if !page_bytes.is_power_of_two() || page_bytes < PAGE_BYTES => {
                "its page size is not a power of two of at least 4096"
            }
            () if !offset.is_multiple_of(PAGE_BYTES) => "its file offset is not a multiple of 4096",
            () if offset % page_bytes != address % page_bytes => {
                "address and file offset have different positions in a huge page"
            }
            () if self.permissions.discard && !kind.is_zero_when_discarded() => {
                "a discarded page of a private file mapping does not read as zero: do not permit discarding"
            }
            () if self.permissions.discard && self.is_read_only => {
                "it is read-only: do not permit discarding"
            }
            () => return None,
        })
    }
}

// SAFETY: the address only names memory of the process; this type does not access it.
unsafe impl Send for ExternalMemory {}
// SAFETY: as above.
unsafe impl Sync for ExternalMemory {}

impl fmt::Debug for ExternalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalMemory")
            .field("address", &self.address)
            .field("len_bytes", &self.len_bytes)
            .field("file", &self.file)
            .field("is_shared", &self.is_shared)
            .field("is_read_only", &self.is_read_only)
            .field("is_filled_on_demand", &self.is_filled_on_demand)
            .field("permissions", &self.permissions)
            .finish_non_exhaustive()
    }
}

impl RamBlock {
    /// Makes a block over memory that the VMM mapped.
    ///
    /// The engine never maps, remaps, unmaps or frees the memory. The block keeps the memory's owner until the
    /// block and all its clones are dropped. The length may be any multiple of 4 KiB, also on huge pages.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::{Arc, Mutex};
    /// use sterna_ram::{ExternalMemory, GuestRam, MemoryPermissions, RamBlock};
    ///
    /// # struct Region(Box<[Page]>);
    /// # #[repr(align(4096))] #[derive(Clone)] struct Page([u8; 4096]);
    /// # impl Region {
    /// #     fn map(bytes: usize) -> Self { Region(vec![Page([0; 4096]); bytes / 4096].into()) }
    /// #     fn address(&self) -> *mut u8 { self.0.as_ptr().cast_mut().cast() }
    /// # }
    /// // `Region` is the VMM's own: it has mapped memory, and unmaps it when it is dropped.
    /// let region = Arc::new(Region::map(1 << 20));
    /// let memory = ExternalMemory::new(region.address(), 1 << 20, region.clone())
    ///     .permit(MemoryPermissions::none().allow_userfaultfd());
    /// // SAFETY: `region` has mapped exactly this, writable, until it is dropped; no reference into it exists.
    /// let block = unsafe { RamBlock::from_external("ram", memory) }?.at_guest_address(0);
    /// let ram = GuestRam::new(vec![block])?;
    /// # assert_eq!(ram.total_bytes(), 1 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Safety
    /// While the owner lives
    /// - the whole range is mapped readable, and writable unless it is described as
    ///   [read-only](ExternalMemory::read_only);
    /// - no Rust reference to any of its bytes exists, except references to atomics;
    /// - it matches its description: shared or private, this file at this offset or no file, pages of this
    ///   size;
    /// - no other memory is mapped in its place.
    ///
    /// The content of the memory and other writers do not matter for safety.
    ///
    /// # Errors
    /// [`RamError::Name`], [`RamError::Length`] (a multiple of 4 KiB is needed), [`RamError::External`] if the
    /// description contradicts itself, [`RamError::System`] if `fstatfs` fails.
    pub unsafe fn from_external(name: impl Into<String>, memory: ExternalMemory) -> Result<Self, RamError> {
        let name = Self::checked_name(name.into())?;
        let len_bytes = memory.len_bytes;
        Self::check_length(&name, len_bytes, PAGE_BYTES)?;
        let failed = |source| RamError::System { block: name.clone(), call: "fstatfs", source };
        let system = match &memory.file {
            Some(range) => sys::file_system(range.file.as_fd()).map_err(failed)?,
            None => FileSystem::Other,
        };
        let page_bytes = match system {
            FileSystem::Hugetlbfs { page_bytes } => page_bytes,
            _ => memory.huge_page_bytes.unwrap_or(PAGE_BYTES),
        };
        let kind = memory.kind(system);
        let too_short = |range: &FileRange| match range.file.metadata() {
            Ok(status) => status.is_file() && status.len() < range.offset.saturating_add(len_bytes),
            Err(_) => false,
        };
        let misfit = memory.misfit(kind, page_bytes).or_else(|| {
            memory.file.as_ref().is_some_and(too_short).then_some("the file is shorter than the block")
        });
        if let Some(rule) = misfit {
            return Err(RamError::External { block: name, rule });
        }
        let mapping = Mapping {
            address: memory.address,
            len: len_bytes as usize,
            page_bytes,
            under: Mutex::new(Under { kind, file: memory.file }),
            is_read_only: AtomicBool::new(memory.is_read_only),
            is_gone: AtomicBool::new(false),
            is_filled_on_demand: memory.is_filled_on_demand,
            filled: Filled::default(),
            permissions: memory.permissions,
            owner: Owner::External(memory.owner),
            siblings: Mutex::default(),
            pins: Mutex::default(),
        };
        let block = RamBlock::of(name, len_bytes, mapping);
        if memory.is_fresh {
            block.declare_fresh();
        }
        Ok(block)
    }
}
