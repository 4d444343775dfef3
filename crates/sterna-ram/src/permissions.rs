//! The operations that the engine may do on a block's memory.

/// The operations that the engine may do on the memory of a block.
///
/// For memory that the VMM mapped, each operation needs the VMM's permission. Memory that the engine mapped
/// permits all.
///
/// Some operations need no permission: reading, writing, and asking the kernel which pages are populated. The
/// same holds for populating pages before bytes are stored into them (`MADV_POPULATE_WRITE`, which changes no
/// byte and no mapping).
///
/// ```
/// use sterna_ram::MemoryPermissions;
///
/// let plain_memory = MemoryPermissions::none().allow_discard().allow_userfaultfd();
/// assert!(plain_memory.discard && !plain_memory.advise);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct MemoryPermissions {
    /// Give memory back to the kernel: `MADV_DONTNEED`, `MADV_REMOVE`, holes in the file.
    ///
    /// Never permit it for memory that is pinned for a device (VFIO) or registered with an RDMA adapter. The
    /// device would continue to use the old pages.
    pub discard: bool,
    /// Register the memory with a userfaultfd of the engine ([`UffdDirtyLog`](crate::dirty::UffdDirtyLog)).
    ///
    /// The registration splits a mapping of which the block covers only a part.
    pub userfaultfd: bool,
    /// Advise the kernel about huge pages ([`RamBlock::advise_huge_pages`](crate::RamBlock::advise_huge_pages)).
    pub advise: bool,
}

impl MemoryPermissions {
    /// Permits no operation: the default for the VMM's memory.
    pub const fn none() -> Self {
        Self { discard: false, userfaultfd: false, advise: false }
    }

    /// Permits all operations: the value for memory that the engine mapped.
    pub const fn all() -> Self {
        Self { discard: true, userfaultfd: true, advise: true }
    }

    /// Adds the permission [`MemoryPermissions::discard`].
    #[must_use]
    pub const fn allow_discard(mut self) -> Self {
        self.discard = true;
        self
    }

    /// Adds the permission [`MemoryPermissions::userfaultfd`].
    #[must_use]
    pub const fn allow_userfaultfd(mut self) -> Self {
        self.userfaultfd = true;
        self
    }

    /// Adds the permission [`MemoryPermissions::advise`].
    #[must_use]
    pub const fn allow_advise(mut self) -> Self {
        self.advise = true;
        self
    }
}
