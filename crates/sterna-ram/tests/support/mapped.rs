//! Memory that a test maps itself, like a VMM.
#![allow(dead_code, reason = "each module uses its own part")]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use sterna_ram::{ExternalMemory, MemoryPermissions, RamBlock, RamError};

pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
pub const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// A mapping that is unmapped when the last handle is dropped.
#[derive(Debug)]
pub struct Mapped {
    address: *mut u8,
    pub len: usize,
    pub file: Option<(Arc<File>, u64)>,
    pub flags: i32,
}

// SAFETY: raw memory of the process; only raw pointers to it are used.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps memory, or returns the reason why this machine cannot.
    pub fn new(len: usize, flags: i32, file: Option<(Arc<File>, u64)>) -> std::io::Result<Arc<Self>> {
        Self::protected(len, READ_WRITE, flags, file)
    }

    pub fn protected(
        len: usize,
        access: i32,
        flags: i32,
        file: Option<(Arc<File>, u64)>,
    ) -> std::io::Result<Arc<Self>> {
        let (fd, offset) = file.as_ref().map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), *offset));
        // SAFETY: the kernel chooses the place.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, offset as i64) };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Arc::new(Self { address: address.cast(), len, file, flags }))
    }

    pub fn anonymous(len: u64) -> Arc<Self> {
        Self::new(len as usize, ANONYMOUS, None).unwrap()
    }

    pub fn shared(file: &Arc<File>, offset: u64, len: u64) -> Arc<Self> {
        Self::new(len as usize, libc::MAP_SHARED, Some((Arc::clone(file), offset))).unwrap()
    }

    pub fn private(file: &Arc<File>, offset: u64, len: u64) -> Arc<Self> {
        Self::new(len as usize, libc::MAP_PRIVATE, Some((Arc::clone(file), offset))).unwrap()
    }

    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// Returns the description that a VMM would give of this memory.
    pub fn external(self: &Arc<Self>) -> ExternalMemory {
        let mut memory = ExternalMemory::new(self.address, self.len as u64, self.clone());
        if let Some((file, offset)) = &self.file {
            memory = memory.file(Arc::clone(file), *offset);
        }
        if self.flags & libc::MAP_SHARED != 0 {
            memory = memory.shared();
        }
        memory
    }

    pub fn block(self: &Arc<Self>, name: &str, permissions: MemoryPermissions) -> RamBlock {
        self.try_block(name, |memory| memory.permit(permissions)).unwrap()
    }

    pub fn try_block(
        self: &Arc<Self>,
        name: &str,
        more: impl FnOnce(ExternalMemory) -> ExternalMemory,
    ) -> Result<RamBlock, RamError> {
        // SAFETY: mapped for as long as `self` lives; tests hold no references into it.
        unsafe { RamBlock::from_external(name, more(self.external())) }
    }

    /// Returns the physical pages, 0 for an absent one; `None` without the privilege to read them.
    pub fn physical_pages(&self) -> Option<Vec<u64>> {
        let pagemap = File::open("/proc/self/pagemap").ok()?;
        let mut bytes = vec![0; self.len / 4096 * 8];
        pagemap.read_exact_at(&mut bytes, self.address as u64 / 4096 * 8).ok()?;
        let entries = bytes.chunks_exact(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap()));
        let pages: Vec<u64> = entries.map(|entry| (entry & ((1 << 55) - 1)) * (entry >> 63)).collect();
        pages.iter().any(|page| *page != 0).then_some(pages)
    }

    /// Populates all pages, like pinning.
    pub fn populate(&self) {
        for page in (0..self.len).step_by(4096) {
            // SAFETY: inside of the mapping, which is writable.
            unsafe { self.address.add(page).write_volatile(self.address.add(page).read_volatile()) };
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and the last handle is being dropped.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// Makes a memfd of this length; `flags` may contain MFD_HUGETLB.
pub fn memfd(len: u64, flags: u32) -> std::io::Result<Arc<File>> {
    // SAFETY: a string that ends in zero.
    let fd = unsafe { libc::memfd_create(c"vmm".as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(Arc::new(file))
}

/// Huge pages that a test reserves, if it has the right, and gives back. Only one test of this process at a
/// time has them.
pub struct Reserve {
    path: String,
    had: u64,
    _turn: std::sync::MutexGuard<'static, ()>,
}

impl Reserve {
    /// Reserves `pages` more huge pages of `bytes` bytes each.
    pub fn more(pages: u64, bytes: u64) -> Self {
        static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", bytes >> 10);
        let had = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let _ = std::fs::write(&path, (had + pages).to_string());
        Reserve { path, had, _turn: turn }
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.path, self.had.to_string());
    }
}
