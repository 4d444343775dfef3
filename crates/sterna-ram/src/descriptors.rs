//! Guest RAM changes hands between two processes of one host without being copied: as descriptors of files.
//!
//! A block that takes memory ([`RamBlock::take_memory`]) maps it read-only and gives none of it back until it is told to
//! [keep](TakenMemory::keep) it: until then the other process may take its guest back, and must find every byte as it was.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::mapping::{FileRange, Kind, Under};
use crate::sys;
use crate::{RamBlock, RamError, SharedFile};

/// Memory of another process in the place of a block's own. Dropped, it goes, and the block's own memory is there again as it was.
#[derive(Debug)]
pub struct TakenMemory {
    block: RamBlock,
    under: Under,
    /// Unless it is over.
    before: Option<Under>,
}

impl RamBlock {
    /// The file of the memory, for a process that shall have it instead of this one.
    ///
    /// # Errors
    /// [`RamError::NotSharable`] for memory that is private to this process, or has no file; [`RamError::Gone`].
    pub fn sharable(&self) -> Result<SharedFile, RamError> {
        let refuse = |rule| Err(RamError::NotSharable { block: self.name().to_owned(), rule });
        self.check(0, 0)?;
        match self.shared_file() {
            _ if self.mapping.is_filled_on_demand() => refuse("pages of it come only when they are touched"),
            Some(shared) => Ok(shared),
            None if self.mapping.len() == 0 => refuse("its bytes are not in memory"),
            None => refuse(
                "it is private memory of this process: let the VMM make guest RAM of a memfd, of huge pages or of a \
                 shared file (`sterna run --backing memfd`)",
            ),
        }
    }

    /// Puts memory of another process in the place of the block's own: the bytes of `file` from `offset` on. It can be read, and not
    /// written, populated or given back, before [`TakenMemory::keep`]. The block's address stays the same.
    ///
    /// # Errors
    /// [`RamError::NotReplaceable`] where this block's own memory must stay; [`RamError::Descriptor`] where `file` is not memory of
    /// this block's length and page size that can be mapped shared and writable; [`RamError::System`]. Nothing has changed then.
    pub fn take_memory(&self, file: File, offset: u64) -> Result<TakenMemory, RamError> {
        self.check_replaceable()?;
        let kind = self.checked(&file, offset)?;
        let range = FileRange { file: Arc::new(file), offset };
        let before = self.mapping.show(&range).map_err(|(call, source)| self.system(call, source))?;
        // What the VMM said of its own memory is not true of this.
        self.take_fresh();
        let under = Under { kind, file: Some(range) };
        Ok(TakenMemory { block: self.clone(), under, before: Some(before) })
    }

    /// Another process has the memory: this one keeps no mapping and no descriptor of it. A block that the engine made of a memfd goes on
    /// with fresh memory, all zero. All other blocks have none from now on ([`RamError::Gone`]), and what the VMM mapped itself it
    /// has to unmap.
    ///
    /// # Errors
    /// [`RamError::System`]. Even then the block's memory is not accessed any more.
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
                "it is private memory: wait with RAM of the source's kind (`sterna run --backing memfd`)",
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

    /// What kind of memory the file is.
    fn checked(&self, file: &File, offset: u64) -> Result<Kind, RamError> {
        let refuse = |what: String| Err(RamError::Descriptor { block: self.name().to_owned(), what });
        let status = file.metadata().map_err(|error| self.system("fstat", error))?;
        if !status.is_file() {
            return refuse("it is no memfd and no regular file".to_owned());
        }
        let system = sys::file_system(file.as_fd()).map_err(|error| self.system("fstatfs", error))?;
        let (kind, page_bytes) = system.kind();
        if page_bytes != self.page_bytes() {
            let ours = self.page_bytes();
            return refuse(format!("its pages have {page_bytes} bytes, and this machine's have {ours}"));
        }
        if !offset.is_multiple_of(page_bytes) {
            return refuse(format!("it begins at {offset:#x}, which is inside of a page"));
        }
        let (length, needed) = (status.size(), offset.checked_add(self.len_bytes()));
        if needed.is_none_or(|needed| length < needed) {
            let ours = self.len_bytes();
            return refuse(format!("the file has {length} bytes, and {ours} from {offset:#x} on are needed"));
        }
        match sys::access_mode(file.as_fd()) {
            Ok(libc::O_RDWR) => {}
            Ok(_) => return refuse("it is not open for reading and writing".to_owned()),
            Err(error) => return Err(self.system("fcntl(F_GETFL)", error)),
        }
        self.check_seals(file).map(|()| kind)
    }

    /// Nobody may shorten it under the mapping, and nobody may have forbidden that the guest writes it.
    fn check_seals(&self, file: &File) -> Result<(), RamError> {
        // Only files in memory have seals.
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
    /// The block.
    pub fn block(&self) -> &RamBlock {
        &self.block
    }

    /// The file that came, to find out whether two descriptors are the same memory: device, inode, and the bytes in it.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn place(&self) -> io::Result<(u64, u64, std::ops::Range<u64>)> {
        let Some(range) = &self.under.file else { return Err(io::ErrorKind::NotFound.into()) };
        let status = range.file.metadata()?;
        let bytes = range.offset..range.offset + self.block.len_bytes();
        Ok((status.dev(), status.ino(), bytes))
    }

    /// Whether the memory is the block's own ([`TakenMemory::keep`]).
    pub fn is_kept(&self) -> bool {
        self.before.is_none()
    }

    /// The memory is the block's own from now on, and writable: the other process has given it up.
    ///
    /// # Errors
    /// [`RamError::System`]: it is still read-only, and this may be tried again.
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
    /// Puts the block's own memory back, as dropping this does, and says whether that worked.
    ///
    /// # Errors
    /// [`RamError::System`]: the other process's memory stays mapped, and read-only.
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
        // If it fails, the memory stays read-only: the other process's guest loses nothing.
        let _ = self.restore();
    }
}
