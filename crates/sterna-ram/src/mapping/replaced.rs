//! Replaces the memory of a mapping at the same address.
//!
//! Users of the address (KVM's slots, devices) continue with the new memory without a notification.

use std::io;
use std::sync::atomic::Ordering;

use super::kind::Kind;
use super::{Backing, FileRange, Mapping, Owner, Under, own};
use crate::page::PAGE_BYTES;

/// The name of a failed system call, and its error.
type Failed = (&'static str, io::Error);

impl Mapping {
    /// Maps `range` in place of the memory, shared and read-only. Returns the replaced memory.
    ///
    /// Afterwards the engine neither writes the memory nor gives it back.
    pub(crate) fn show(&self, range: &FileRange) -> Result<Under, Failed> {
        // The lock prevents a concurrent `discard`.
        let _pins = self.pins.lock();
        let mut under = self.under.lock();
        own::map_over(self.address, self.len, libc::PROT_READ, range).map_err(|error| ("mmap", error))?;
        self.is_read_only.store(true, Ordering::Release);
        self.is_gone.store(false, Ordering::Release);
        // The kind `File` without a file: no page is known to be absent, and no file can be discarded.
        Ok(std::mem::replace(&mut *under, Under { kind: Kind::File, file: None }))
    }

    /// Makes the memory that [`Mapping::show`] mapped the mapping's own, and writable.
    pub(crate) fn keep(&self, under: Under) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        own::make_writable(self.address, self.len).map_err(|error| ("mprotect", error))?;
        *self.under.lock() = under;
        self.is_read_only.store(false, Ordering::Release);
        Ok(())
    }

    /// Undoes [`Mapping::show`] and maps `before` again. If the kernel refuses, the memory stays read-only.
    pub(crate) fn show_again(&self, before: Under) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let put_back = match &before.file {
            Some(file) => own::map_over(self.address, self.len, access, file),
            // The mapping had no memory before.
            None => {
                self.is_gone.store(true, Ordering::Release);
                own::unmap_in_place(self.address, self.len)
            }
        };
        put_back.map_err(|error| ("mmap", error))?;
        *self.under.lock() = before;
        self.is_read_only.store(false, Ordering::Release);
        Ok(())
    }

    /// Releases memory that another process has now.
    ///
    /// A memfd of the engine on normal pages is replaced with fresh memory of the same kind. All other mappings
    /// have no memory afterwards.
    pub(crate) fn let_go(&self, name: &str) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        // Set first: also after a later failure, this process must not access the memory.
        self.is_gone.store(true, Ordering::Release);
        let mut under = self.under.lock();
        let had = std::mem::replace(&mut *under, Under { kind: Kind::File, file: None });
        if !matches!(self.owner, Owner::Mapping) {
            return Ok(());
        }
        if had.kind != Kind::Tmpfs || self.page_bytes != PAGE_BYTES {
            return own::unmap_in_place(self.address, self.len).map_err(|error| ("mmap", error));
        }
        let file = own::memfd(name, self.len, Backing::Memfd)?;
        let range = FileRange { file: std::sync::Arc::new(file), offset: 0 };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        own::map_over(self.address, self.len, access, &range).map_err(|error| ("mmap", error))?;
        *under = Under { kind: Kind::Tmpfs, file: Some(range) };
        self.is_gone.store(false, Ordering::Release);
        Ok(())
    }

    /// Whether the mapping's memory may be replaced.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.owner, Owner::Mapping)
    }
}
