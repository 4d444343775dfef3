//! The guest's memory, which the program has mapped.

use std::ffi::{c_char, c_void};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sterna::ram::{ExternalMemory, MemoryPermissions, RamBlock};

use crate::boundary::{Done, Versioned, enter, read, text};
use crate::error::{Failure, STERNA_ERROR_ARGUMENT, STERNA_ERROR_SYSTEM, sterna_error};
use crate::parts::Parts;
use crate::vm::sterna_vm;

/// The memory is mapped MAP_SHARED.
pub const STERNA_RAM_SHARED: u32 = 1;
/// The mapping is read-only. A source reads it. A destination compares it with the received pages.
pub const STERNA_RAM_READ_ONLY: u32 = 2;
/// The program fills missing pages when they are first touched (a userfaultfd of its own).
pub const STERNA_RAM_FILLED_ON_DEMAND: u32 = 4;
/// The memory reads as zero now, and nothing writes it before the guest arrives. Holds for one migration.
pub const STERNA_RAM_FRESH: u32 = 8;
/// The library may return pages to the kernel. Never set it for memory that is pinned for a device (VFIO) or RDMA.
pub const STERNA_RAM_MAY_DISCARD: u32 = 16;
/// The library may register the memory with a userfaultfd. A destination of postcopy needs it, and
/// sterna_vm_use_userfaultfd.
pub const STERNA_RAM_MAY_USERFAULTFD: u32 = 32;
/// The library may advise the kernel to use huge pages.
pub const STERNA_RAM_MAY_ADVISE: u32 = 64;
/// The block has the guest-physical address `guest_address`.
pub const STERNA_RAM_AT_GUEST_ADDRESS: u32 = 128;
/// Destination: the block contains bytes of the VMM that stay unless the source sends their page, such as a ROM.
pub const STERNA_RAM_KEEPS_BYTES: u32 = 256;

const ALL_FLAGS: u32 = 511;

/// A block of guest memory that the program has mapped. The library never maps, unmaps or frees it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_ram_block {
    /// sizeof(sterna_ram_block).
    pub size: usize,
    /// The block's name, 1 to 255 bytes. Equal at source and destination. Copied.
    pub name: *const c_char,
    /// The first byte in this process, a multiple of 4096.
    pub address: *mut c_void,
    /// The length in bytes, a multiple of 4096. Equal at source and destination.
    pub length: u64,
    /// The guest-physical address, with STERNA_RAM_AT_GUEST_ADDRESS.
    pub guest_address: u64,
    /// The file that is mapped: a memfd, or a file on tmpfs, hugetlbfs or a disk; -1 for none. It is duplicated.
    pub fd: i32,
    /// STERNA_RAM_…, combined by "or".
    pub flags: u32,
    /// The offset of the first byte in the file, in bytes.
    pub fd_offset: u64,
    /// The size of the pages in bytes if the memory has no file and is on huge pages (MAP_HUGETLB), otherwise 0.
    pub huge_page_bytes: u64,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_ram_block {
    const NAME: &str = "sterna_ram_block";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// Adds a block of guest memory. All blocks are added before the VM's first migration, in the same order on both
/// sides.
///
/// From this call until `destroy` of the VM's callbacks was called: the whole range is mapped, readable, and
/// writable unless STERNA_RAM_READ_ONLY is set. Nothing else is mapped in its place. The description is true.
/// The guest, devices and other threads may write the memory at any time.
///
/// Errors: STERNA_ERROR_ARGUMENT for a description that contradicts itself, STERNA_ERROR_STATE after the first
/// migration began. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_add_ram(
    vm: *mut sterna_vm,
    block: *const sterna_ram_block,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                let (block, keeps_bytes) = block_of(&read(block)?, parts)?;
                parts.blocks.push(block);
                parts.keeps_bytes.push(keeps_bytes);
                Ok(())
            })
        })
    }
}

/// # Safety
/// The pointers of `given` are as the header says.
unsafe fn block_of(given: &sterna_ram_block, parts: &Parts) -> Done<(RamBlock, bool)> {
    // SAFETY: as the contract says.
    let name = unsafe { text(given.name, "sterna_ram_block.name") }?;
    let has = |flag| given.flags & flag != 0;
    if given.flags & !ALL_FLAGS != 0 {
        let text =
            format!("block {name}: flags {:#x} are unknown: use a newer libsterna", given.flags & !ALL_FLAGS);
        return Err(Failure::new(STERNA_ERROR_ARGUMENT, text));
    }
    let owner = Arc::clone(&parts.vm);
    let mut memory =
        ExternalMemory::new(given.address.cast(), given.length, owner).permit(permissions(given.flags));
    if has(STERNA_RAM_SHARED) {
        memory = memory.shared();
    }
    if given.fd >= 0 {
        // SAFETY: the caller keeps the descriptor open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(given.fd) }.try_clone_to_owned();
        let file = file.map_err(|error| {
            Failure::new(
                STERNA_ERROR_SYSTEM,
                format!("block {name}: duplicating descriptor {}: {error}", given.fd),
            )
        })?;
        memory = memory.file(Arc::new(File::from(file)), given.fd_offset);
    }
    if given.huge_page_bytes != 0 {
        memory = memory.huge_pages(given.huge_page_bytes);
    }
    if has(STERNA_RAM_READ_ONLY) {
        memory = memory.read_only();
    }
    if has(STERNA_RAM_FILLED_ON_DEMAND) {
        memory = memory.filled_on_demand();
    }
    if has(STERNA_RAM_FRESH) {
        memory = memory.fresh();
    }
    // SAFETY: sterna_vm_add_ram has this contract. `owner` calls `destroy` when it is dropped. No Rust code but the
    // engine knows the memory.
    let block = unsafe { RamBlock::from_external(name, memory) };
    let block = block.map_err(|error| Failure::new(STERNA_ERROR_ARGUMENT, error))?;
    let placed = has(STERNA_RAM_AT_GUEST_ADDRESS);
    Ok((
        if placed { block.at_guest_address(given.guest_address) } else { block },
        has(STERNA_RAM_KEEPS_BYTES),
    ))
}

fn permissions(flags: u32) -> MemoryPermissions {
    let mut permissions = MemoryPermissions::none();
    permissions.discard = flags & STERNA_RAM_MAY_DISCARD != 0;
    permissions.userfaultfd = flags & STERNA_RAM_MAY_USERFAULTFD != 0;
    permissions.advise = flags & STERNA_RAM_MAY_ADVISE != 0;
    permissions
}
