//! A block of guest RAM: one named mapping, with checked access to its bytes.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::RamError;
use crate::filling::Filling;
use crate::guard::RamFault;
use crate::mapping::{Backing, Mapping, Under};
use crate::page::{PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE};
use crate::permissions::MemoryPermissions;
use crate::poison::Poison;
use crate::slice::RamSlice;
use crate::sys;

/// The file of a block's memory, which another process can map, too.
#[derive(Debug, Clone)]
pub struct SharedFile {
    /// The open file that contains the memory.
    pub file: Arc<File>,
    /// Offset in the file at which the block begins, in bytes.
    pub offset: u64,
}

/// A named part of guest RAM. Cloning a block shares its memory.
///
/// The engine maps and unmaps the memory ([`RamBlock::new`]), or the VMM owns it ([`RamBlock::from_external`])
/// and the engine leaves it mapped. The guest may write it at any time, so every access is volatile, atomic, or
/// done by the kernel.
#[derive(Debug, Clone)]
pub struct RamBlock {
    name: Arc<str>,
    len_bytes: u64,
    pub(crate) mapping: Arc<Mapping>,
    /// The guest-physical address of the block, if the VMM stated it.
    pub(crate) guest_address: Option<u64>,
    pub(crate) poison: Arc<Poison>,
    /// Whether the owner stated that the memory reads as zero. The next migration uses and clears this.
    is_fresh: Arc<AtomicBool>,
}

impl RamBlock {
    /// Maps a block of `len_bytes` that reads as zero and is not populated.
    ///
    /// # Errors
    /// [`RamError::Name`], [`RamError::Length`] (a multiple of [`Backing::unit_bytes`] is needed), or
    /// [`RamError::System`] if the kernel refuses (no huge pages reserved, no address space).
    pub fn new(name: impl Into<String>, len_bytes: u64, backing: Backing) -> Result<Self, RamError> {
        let name = Self::checked_name(name.into())?;
        Self::check_length(&name, len_bytes, backing.unit_bytes())?;
        match Mapping::new(&name, len_bytes as usize, backing) {
            Ok(mapping) => Ok(RamBlock::of(name, len_bytes, mapping)),
            Err((call, source)) => Err(RamError::System { block: name, call, source }),
        }
    }

    /// Maps the first `len_bytes` of a file, shared with every other process that maps it.
    ///
    /// The file may be on tmpfs, on hugetlbfs or on a disk. It must not be shortened while the block lives.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), with the page size of the file's memory, and [`RamError::External`] if
    /// the file is too short.
    pub fn of_file(name: impl Into<String>, len_bytes: u64, file: File) -> Result<Self, RamError> {
        let name = Self::checked_name(name.into())?;
        let failed = |(call, source)| RamError::System { block: name.clone(), call, source };
        let system = sys::file_system(file.as_fd()).map_err(|error| failed(("fstatfs", error)))?;
        let (kind, page_bytes) = system.kind();
        Self::check_length(&name, len_bytes, page_bytes)?;
        let status = file.metadata().map_err(|error| failed(("fstat", error)))?;
        let rule = match status.len() {
            _ if !status.is_file() => Some("the memory to share is not a regular file"),
            bytes if bytes < len_bytes => Some("the file is shorter than the block"),
            _ => None,
        };
        if let Some(rule) = rule {
            return Err(RamError::External { block: name, rule });
        }
        let mapping = Mapping::of_file(len_bytes as usize, file, kind, page_bytes).map_err(failed)?;
        Ok(RamBlock::of(name, len_bytes, mapping))
    }

    /// Reserves the addresses of a block whose memory another process will hand over
    /// ([`take_memory`](Self::take_memory)).
    ///
    /// Until then the block has no memory ([`RamError::Gone`]). Huge pages are therefore needed only once.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`RamError::NotReplaceable`] for private memory, which cannot be
    /// handed over.
    pub fn awaiting(name: impl Into<String>, len_bytes: u64, backing: Backing) -> Result<Self, RamError> {
        let name = Self::checked_name(name.into())?;
        Self::check_length(&name, len_bytes, backing.unit_bytes())?;
        if backing == Backing::Anonymous {
            let rule = "private memory cannot be passed to another process: start the destination with the source's \
                        kind of RAM (`sterna run --backing memfd`)";
            return Err(RamError::NotReplaceable { block: name, rule });
        }
        match Mapping::awaiting(len_bytes as usize, backing) {
            Ok(mapping) => Ok(RamBlock::of(name, len_bytes, mapping)),
            Err((call, source)) => Err(RamError::System { block: name, call, source }),
        }
    }

    /// Makes a block that has a name and a length but no memory.
    ///
    /// Its bytes are in an image, so every access to them is refused.
    ///
    /// # Errors
    /// [`RamError::Name`], [`RamError::Length`] (a multiple of the page size is needed).
    pub fn without_memory(name: impl Into<String>, len_bytes: u64) -> Result<Self, RamError> {
        let name = Self::checked_name(name.into())?;
        if !len_bytes.is_multiple_of(PAGE_BYTES) || i64::try_from(len_bytes).is_err() {
            return Err(RamError::Length { block: name, len_bytes, unit_bytes: PAGE_BYTES });
        }
        Ok(RamBlock::of(name, len_bytes, Mapping::none()))
    }

    pub(crate) fn of(name: String, len_bytes: u64, mapping: Mapping) -> Self {
        RamBlock {
            name: name.into(),
            len_bytes,
            mapping: Arc::new(mapping),
            guest_address: None,
            poison: Arc::default(),
            is_fresh: Arc::default(),
        }
    }

    pub(crate) fn checked_name(name: String) -> Result<String, RamError> {
        if name.is_empty() || name.len() > 255 { Err(RamError::Name { name }) } else { Ok(name) }
    }

    pub(crate) fn check_length(name: &str, len_bytes: u64, unit_bytes: u64) -> Result<(), RamError> {
        let fits = usize::try_from(len_bytes).is_ok_and(|len| isize::try_from(len).is_ok());
        if len_bytes == 0 || !len_bytes.is_multiple_of(unit_bytes) || !fits {
            return Err(RamError::Length { block: name.to_owned(), len_bytes, unit_bytes });
        }
        Ok(())
    }

    /// Returns the block's name in the migration stream.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the length in pages of [`PAGE_SIZE`].
    pub fn pages(&self) -> u64 {
        self.len_bytes >> PAGE_SHIFT
    }

    /// Returns the page size of the backing: [`PAGE_SIZE`], or the size of its huge pages.
    pub fn page_bytes(&self) -> u64 {
        self.mapping.page_bytes()
    }

    /// Whether another process has the memory, so that it cannot be accessed here ([`RamError::Gone`]).
    pub fn is_gone(&self) -> bool {
        self.mapping.is_gone()
    }

    /// Whether the memory is mapped shared, so that another process may have it, too.
    pub fn is_shared(&self) -> bool {
        self.mapping.kind().is_shared()
    }

    /// Whether the memory is mapped read-only.
    ///
    /// A store through a window onto it ([`RamBlock::slice`]) raises SIGSEGV.
    pub fn is_read_only(&self) -> bool {
        self.mapping.is_read_only()
    }

    /// Returns the operations that the engine may do on the memory.
    pub fn permissions(&self) -> MemoryPermissions {
        self.mapping.permissions()
    }

    /// States that every byte reads as zero until the next migration arrives.
    ///
    /// No thread may write before that. Call it for memory that the VMM has just mapped, even if it is
    /// populated (pinned for a device). The next migration into it trusts this statement: it neither reads nor
    /// writes a page that arrives as zero. Without the statement, the engine asks the kernel which pages are
    /// populated, and compares each of those before it stores zeros.
    ///
    /// The statement is valid for one migration, and ends when the engine learns of a guest in this memory.
    pub fn declare_fresh(&self) {
        self.is_fresh.store(true, Ordering::Release);
    }

    /// Whether the block was [declared fresh](RamBlock::declare_fresh). The call also ends that statement.
    pub fn take_fresh(&self) -> bool {
        self.is_fresh.swap(false, Ordering::AcqRel)
    }

    /// States that `server` fills the block's missing pages. Call it after the memory is registered and before anything
    /// reads it.
    ///
    /// Until [`end_filling`](Self::end_filling), pages that the server owes are never reported as absent, and the memory
    /// cannot be handed to another process.
    pub fn begin_filling(&self, server: Arc<dyn Filling>) {
        self.mapping.filled.begin(server);
    }

    /// States that all pages are in memory or read as zero, and that no access waits any more.
    pub fn end_filling(&self) {
        self.mapping.filled.end();
    }

    /// Whether pages of the block may still arrive from a server of this process.
    pub fn is_filling(&self) -> bool {
        self.mapping.filled.is_active()
    }

    /// Returns the address of the mapping in this process, for example for KVM memory slots.
    ///
    /// A caller that gives this address to the kernel or to a vCPU thread must keep the block alive while the
    /// address is in use.
    pub fn host_address(&self) -> *mut u8 {
        self.mapping.address()
    }

    /// Returns file and offset of the memory, so that another process can map it.
    ///
    /// `None` for memory without a file, and for a private mapping of a file.
    pub fn shared_file(&self) -> Option<SharedFile> {
        let Under { kind, file } = self.mapping.under();
        let range = file.filter(|_| kind.is_shared())?;
        Some(SharedFile { file: range.file, offset: range.offset })
    }

    /// Copies bytes into `to`. Each byte is read once; a byte that the guest writes meanwhile may be old or
    /// new.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::Poisoned`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), RamError> {
        self.slice(offset, to.len())?.copy_to(to).map_err(|fault| self.failed(fault, offset >> PAGE_SHIFT))
    }

    /// Copies bytes from `from` into the block.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::Poisoned`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), RamError> {
        self.check_writable()?;
        self.slice(offset, from.len())?
            .copy_from(from)
            .map_err(|fault| self.failed(fault, offset >> PAGE_SHIFT))
    }

    /// Reads an aligned `u64` in one piece (relaxed order, host byte order).
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::Misaligned`].
    pub fn read_u64(&self, offset: u64) -> Result<u64, RamError> {
        Ok(self.atomic(offset)?.load(Ordering::Relaxed))
    }

    /// Writes an aligned `u64` in one piece (relaxed order, host byte order).
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::Misaligned`].
    pub fn write_u64(&self, offset: u64, value: u64) -> Result<(), RamError> {
        self.check_writable()?;
        self.atomic(offset)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Returns a window onto `[offset, offset + len)`.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`]; [`RamError::Poisoned`] if one of its pages is known to have failed.
    pub fn slice(&self, offset: u64, len: usize) -> Result<RamSlice<'_>, RamError> {
        self.check(offset, len as u64)?;
        self.check_sound(offset, len as u64)?;
        // SAFETY: the range was just checked against the mapping, which lives as long as `self`.
        Ok(unsafe { RamSlice::from_raw(self.mapping.address().wrapping_add(offset as usize), len) })
    }

    /// Returns a window onto one page.
    ///
    /// # Errors
    /// The errors of [`slice`](Self::slice).
    pub fn page(&self, page: u64) -> Result<RamSlice<'_>, RamError> {
        self.slice(page.saturating_mul(PAGE_BYTES), PAGE_SIZE)
    }

    /// Makes pages resident and writable, as if each had been written, without changing a byte.
    ///
    /// # Errors
    /// [`RamError::OutOfRange`], [`RamError::Poisoned`], [`RamError::NoHugePage`], [`RamError::System`] (no memory).
    pub fn populate(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check_pages(first, count)?;
        self.check_writable()?;
        if count == 0 {
            return Ok(());
        }
        let (offset, len) = (first * PAGE_BYTES, count * PAGE_BYTES);
        match self.mapping.advise(offset, len, libc::MADV_POPULATE_WRITE) {
            Ok(()) => Ok(()),
            // Linux before 5.14 does not support the advice, so the pages are touched instead.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                for page in first..first + count {
                    self.atomic(page * PAGE_BYTES)?.fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(source) => Err(self.not_populated(first, count, source)),
        }
    }

    /// Makes all pages readable without a page fault, like reading a byte of each.
    ///
    /// Pages that were never written take no memory.
    pub(crate) fn populate_to_read(&self) -> Result<(), RamError> {
        match self.mapping.advise(0, self.len_bytes, libc::MADV_POPULATE_READ) {
            Ok(()) => Ok(()),
            // Linux before 5.14, as in [`RamBlock::populate`].
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (0..self.pages()).try_for_each(|page| {
                    let _ = self.atomic(page * PAGE_BYTES)?.load(Ordering::Relaxed);
                    Ok(())
                })
            }
            Err(source) => Err(self.system("madvise(MADV_POPULATE_READ)", source)),
        }
    }

    /// Returns the error for a failed MADV_POPULATE_WRITE.
    fn not_populated(&self, first: u64, count: u64, source: std::io::Error) -> RamError {
        // EHWPOISON means a failed page. EFAULT means any other reason for which an access would raise SIGBUS.
        // On huge pages that reason is a lack of huge pages, and a probe would fail for the same reason.
        if self.mapping.is_huge() && source.raw_os_error() == Some(libc::EFAULT) {
            let (offset, len) = (first * PAGE_BYTES, count * PAGE_BYTES);
            return RamError::NoHugePage { block: self.name().to_owned(), offset, len };
        }
        let failed = sys::is_failed_memory(&source).then(|| self.failed_in(first, count)).flatten();
        failed.unwrap_or_else(|| self.system("madvise(MADV_POPULATE_WRITE)", source))
    }

    /// Advises the kernel to use transparent huge pages, or not to use them.
    ///
    /// They are faster to populate, but a sparse block takes more memory. The advice has no effect on reserved
    /// huge pages.
    ///
    /// # Errors
    /// [`RamError::NotPermitted`] for memory of a VMM that does not permit it, [`RamError::System`].
    pub fn advise_huge_pages(&self, wanted: bool) -> Result<(), RamError> {
        if !self.permissions().advise {
            let action = "advise the kernel about huge pages of";
            return Err(RamError::NotPermitted { block: self.name().to_owned(), action });
        }
        if self.mapping.is_huge() {
            return Ok(());
        }
        let advice = if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        self.mapping
            .advise(0, self.mapping.len() as u64, advice)
            .map_err(|source| self.system("madvise(MADV_HUGEPAGE)", source))
    }

    fn atomic(&self, offset: u64) -> Result<&AtomicU64, RamError> {
        self.check(offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(RamError::Misaligned { block: self.name().to_owned(), offset, align: 8 });
        }
        self.check_sound(offset, 8)?;
        let pointer = self.mapping.address().wrapping_add(offset as usize);
        // SAFETY: inside the mapping, aligned (the mapping is page-aligned), alive while `self` is, and
        // any eight bytes are a valid AtomicU64. Others access it atomically, volatile, or not in Rust.
        Ok(unsafe { AtomicU64::from_ptr(pointer.cast()) })
    }

    /// Returns the number of mapped bytes, which is 0 for a block without memory.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Returns the error for a failed access that began in page `first`.
    pub(crate) fn failed(&self, fault: RamFault, first: u64) -> RamError {
        self.why_failed(self.page_at(fault.address).unwrap_or(first))
    }

    fn check_sound(&self, offset: u64, len: u64) -> Result<(), RamError> {
        match self.poison.first_in(offset >> PAGE_SHIFT, (offset + len).div_ceil(PAGE_BYTES)) {
            Some(page) => Err(RamError::Poisoned { page: self.poisoned_page(page) }),
            None => Ok(()),
        }
    }

    pub(crate) fn check(&self, offset: u64, len: u64) -> Result<(), RamError> {
        if self.mapping.is_gone() {
            return Err(RamError::Gone { block: self.name().to_owned() });
        }
        // A block without memory has a mapped length of 0, so every access is out of range.
        match offset.checked_add(len) {
            Some(end) if end <= self.mapping.len() as u64 => Ok(()),
            _ => Err(RamError::OutOfRange {
                block: self.name().to_owned(),
                offset,
                len,
                block_len_bytes: self.mapping.len() as u64,
            }),
        }
    }

    pub(crate) fn check_pages(&self, first: u64, count: u64) -> Result<(), RamError> {
        self.check(first.saturating_mul(PAGE_BYTES), count.saturating_mul(PAGE_BYTES))
    }

    pub(crate) fn check_writable(&self) -> Result<(), RamError> {
        let is_writable = !self.is_read_only();
        is_writable.then_some(()).ok_or_else(|| RamError::ReadOnly { block: self.name().to_owned() })
    }

    pub(crate) fn system(&self, call: &'static str, source: std::io::Error) -> RamError {
        RamError::System { block: self.name().to_owned(), call, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageBitmap;

    #[test]
    fn without_memory_every_access_is_refused_and_the_shape_is_there() {
        let block = RamBlock::without_memory("pc.ram", 1 << 40).unwrap();

        assert_eq!((block.name(), block.len_bytes(), block.pages()), ("pc.ram", 1 << 40, 1 << 28));
        assert!(block.slice(0, 1).is_err());
        assert!(block.read(0, &mut [0; 8]).is_err());
        assert!(block.write_u64(0, 1).is_err());
        assert!(block.zero_pages(0, 1).is_err());
        assert!(block.populate(0, 1).is_err());
        assert!(block.mark_absent(0, 1, &PageBitmap::new(1 << 28)).is_err());
        block.discard_all().unwrap();
        assert_eq!(block.resident_bytes().unwrap(), 0);
        assert!(RamBlock::without_memory("odd", 4097).is_err());
    }

    #[test]
    fn huge_page_that_cannot_be_had_is_not_memory_that_has_failed() {
        let block = |backing: Backing| {
            // The test works on machines without huge pages: only the page size is changed.
            let mut mapping = Mapping::new("ram", 4 << 20, Backing::Memfd).unwrap();
            mapping.page_bytes = backing.unit_bytes();
            let block = RamBlock::of("ram".to_owned(), 4 << 20, mapping);
            // One page without access rights.
            // SAFETY: the page is the block's own, and no reference to it exists.
            let result = unsafe { libc::mprotect(block.host_address().cast(), PAGE_SIZE, libc::PROT_NONE) };
            assert_eq!(result, 0);
            block
        };
        let why =
            |backing, errno| block(backing).not_populated(0, 512, std::io::Error::from_raw_os_error(errno));

        let lack = why(Backing::Huge2M, libc::EFAULT);
        assert!(matches!(lack, RamError::NoHugePage { offset: 0, len: 0x20_0000, .. }), "{lack}");
        assert!(matches!(why(Backing::Huge2M, libc::EHWPOISON), RamError::Poisoned { .. }));
        assert!(matches!(why(Backing::Memfd, libc::EFAULT), RamError::Poisoned { .. }));
        assert!(matches!(why(Backing::Huge2M, libc::ENOMEM), RamError::System { .. }));
    }
}
