//! Hands guest RAM to another process of this host as file descriptors, without a copy.
//!
//! A block that takes memory ([`RamBlock::take_memory`]) maps it read-only and gives none of it back to the
//! kernel before [`TakenMemory::keep`]. Until then, the other process may resume its guest, and must find every
//! byte unchanged.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::block::{RamBlock, SharedFile};
use crate::error::RamError;
use crate::mapping::kind::Kind;
use crate::mapping::{FileRange, Under};
use crate::sys;

/// Memory of another process in place of a block's own. Dropping it restores the block's own memory.
#[derive(Debug)]
pub struct TakenMemory {
    block: RamBlock,
    under: Under,
    /// The block's own memory; `None` after `keep` or a restore.
    before: Option<Under>,
}

impl RamBlock {
    /// Returns the file of the memory, for a process that takes it over.
    ///
    /// # Errors
    /// [`RamError::NotSharable`] for memory that is private to this process, or has no file; [`RamError::Gone`].
    pub fn sharable(&self) -> Result<SharedFile, RamError> {
        let refuse = |rule| Err(RamError::NotSharable { block: self.name().to_owned(), rule });
        self.check(0, 0)?;
        match self.shared_file() {
            _ if self.mapping.is_filled_on_demand() => {
                refuse("its pages arrive only when the guest touches them")
            }
            _ if self.is_filling() => refuse(
                "a part of its pages still has to be loaded from the image that it was restored from: try again \
                 when `x-sterna-query-restore` says `completed`",
            ),
            Some(shared) => Ok(shared),
            None if self.mapping.len() == 0 => refuse("its bytes are not in memory"),
            None => refuse(
                "it is private memory of this process: the VMM must use a memfd, huge pages or a shared file for \
                 guest RAM (`sterna run --backing memfd`)",
            ),
        }
    }

    /// Maps `file` from byte `offset` on in place of the block's own memory.
    ///
    /// The file contains memory of another process. Before [`TakenMemory::keep`], it can be read but not
    /// written, populated or given back. The block's address does not change.
    ///
    /// # Errors
    /// - [`RamError::NotReplaceable`] if this block's own memory cannot be replaced.
    /// - [`RamError::Descriptor`] if `file` does not match the block's length and page size, or cannot be
    ///   mapped shared and writable.
    /// - [`RamError::System`] if a system call fails.
    ///
    /// Nothing has changed then.
    pub fn take_memory(&self, file: File, offset: u64) -> Result<TakenMemory, RamError> {
        self.check_replaceable()?;
        let kind = self.checked(&file, offset)?;
        let range = FileRange { file: Arc::new(file), offset };
        let before = self.mapping.show(&range).map_err(|(call, source)| self.system(call, source))?;
        // The VMM's statement was about its own memory.
        self.take_fresh();
        let under = Under { kind, file: Some(range) };
        Ok(TakenMemory { block: self.clone(), under, before: Some(before) })
    }

    /// Releases memory that another process has now: this process keeps no mapping and no descriptor.
    ///
    /// A block that the engine made of a memfd gets fresh memory that reads as zero. All other blocks have no
    /// memory afterwards ([`RamError::Gone`]). The VMM must unmap the memory that it mapped itself.
    ///
    /// # Errors
    /// [`RamError::System`]. Even then, the engine does not access the block's memory any more.
    pub fn let_go(&self) -> Result<(), RamError> {
        self.mapping.let_go(self.name()).map_err(|(call, source)| self.system(call, source))
    }

    fn check_replaceable(&self) -> Result<(), RamError> {
        let refuse = |rule| Err(RamError::NotReplaceable { block: self.name().to_owned(), rule });
        if self.mapping.len() == 0 {
            return refuse("its bytes are not in memory");
        }
        if !self.mapping.is_own() {
            return refuse("the VMM has mapped it itself");
        }
        if self.mapping.is_gone() {
            return Ok(());
        }
        if self.shared_file().is_none() {
            return refuse(
                "it is private memory: start the destination with the source's kind of RAM (`sterna run --backing \
                 memfd`)",
            );
        }
        if self.is_read_only() {
            return refuse("it is read-only");
        }
        if self.pinned_in(0, self.pages()).is_some() {
            return refuse("it is registered with an adapter");
        }
        Ok(())
    }

    /// Checks that the file can replace the block's memory, and returns its kind.
    fn checked(&self, file: &File, offset: u64) -> Result<Kind, RamError> {
        let refuse = |what: String| Err(RamError::Descriptor { block: self.name().to_owned(), what });
        let status = file.metadata().map_err(|error| self.system("fstat", error))?;
        if !status.is_file() {
            return refuse("it is neither a memfd nor a regular file".to_owned());
        }
        let system = sys::file_system(file.as_fd()).map_err(|error| self.system("fstatfs", error))?;
        let (kind, page_bytes) = system.kind();
        if page_bytes != self.page_bytes() {
            let ours = self.page_bytes();
            return refuse(format!("its pages have {page_bytes} bytes, but this machine's have {ours}"));
        }
        if !offset.is_multiple_of(page_bytes) {
            return refuse(format!("it begins at {offset:#x}, which is inside a page"));
        }
        let (length, needed) = (status.size(), offset.checked_add(self.len_bytes()));
        if needed.is_none_or(|needed| length < needed) {
            let ours = self.len_bytes();
            return refuse(format!("the file has {length} bytes, but {ours} at {offset:#x} are needed"));
        }
        match sys::access_mode(file.as_fd()) {
            Ok(libc::O_RDWR) => {}
            Ok(_) => return refuse("it is not open for reading and writing".to_owned()),
            Err(error) => return Err(self.system("fcntl(F_GETFL)", error)),
        }
        self.check_seals(file).map(|()| kind)
    }

    /// Seals the file against shrinking, and refuses a file that is sealed against writing.
    ///
    /// Without the seal, another process could shorten the file under the mapping.
    fn check_seals(&self, file: &File) -> Result<(), RamError> {
        // Only files on tmpfs or hugetlbfs have seals.
        let Ok(seals) = sys::seals(file.as_fd()) else { return Ok(()) };
        if seals & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0 {
            let what = "it is sealed against writing, so a guest cannot run in it".to_owned();
            return Err(RamError::Descriptor { block: self.name().to_owned(), what });
        }
        if seals & (libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL) == 0 {
            sys::seal(file.as_fd(), libc::F_SEAL_SHRINK)
                .map_err(|error| self.system("fcntl(F_ADD_SEALS)", error))?;
        }
        Ok(())
    }
}

impl TakenMemory {
    /// Returns the block whose memory was replaced.
    pub fn block(&self) -> &RamBlock {
        &self.block
    }

    /// Returns device, inode and byte range of the file.
    ///
    /// They show whether two descriptors are the same memory.
    ///
    /// # Errors
    /// The kernel's error of `fstat`.
    pub fn place(&self) -> io::Result<(u64, u64, std::ops::Range<u64>)> {
        let Some(range) = &self.under.file else { return Err(io::ErrorKind::NotFound.into()) };
        let status = range.file.metadata()?;
        let bytes = range.offset..range.offset + self.block.len_bytes();
        Ok((status.dev(), status.ino(), bytes))
    }

    /// Whether the memory is the block's own, after [`TakenMemory::keep`].
    pub fn is_kept(&self) -> bool {
        self.before.is_none()
    }

    /// Makes the memory the block's own and writable. The other process must have given it up.
    ///
    /// # Errors
    /// [`RamError::System`]: the memory is still read-only, and the call may be repeated.
    pub fn keep(&mut self) -> Result<(), RamError> {
        if self.before.is_none() {
            return Ok(());
        }
        let kept = self.block.mapping.keep(self.under.clone());
        kept.map_err(|(call, source)| self.block.system(call, source))?;
        self.before = None;
        Ok(())
    }
}

impl TakenMemory {
    /// Restores the block's own memory, like a drop, and returns whether that succeeded.
    ///
    /// # Errors
    /// [`RamError::System`]: the other process's memory stays mapped read-only.
    pub fn give_back(mut self) -> Result<(), RamError> {
        self.restore()
    }

    fn restore(&mut self) -> Result<(), RamError> {
        let Some(before) = self.before.take() else { return Ok(()) };
        self.block.mapping.show_again(before).map_err(|(call, source)| self.block.system(call, source))
    }
}

impl Drop for TakenMemory {
    fn drop(&mut self) {
        // After a failure the memory stays read-only, so the other process's guest loses no data.
        let _ = self.restore();
    }
}
