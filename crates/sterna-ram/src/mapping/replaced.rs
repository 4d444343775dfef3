//! Other memory comes to the place of a mapping, at the same address: whoever knows the address (KVM's slots, devices) goes on with
//! the new memory and need not be told.

use std::io;
use std::sync::atomic::Ordering;

use super::{Backing, FileRange, Kind, Mapping, Owner, Under, own};
use crate::PAGE_BYTES;

/// A system call that failed, and how.
type Failed = (&'static str, io::Error);

impl Mapping {
    /// Maps `range` in place of the memory, shared and read-only. Nothing writes it or gives it back from now on. Gives what was
    /// there.
    pub(crate) fn show(&self, range: &FileRange) -> Result<Under, Failed> {
        // Nothing is given back meanwhile.
        let _pins = self.pins.lock();
        let mut under = self.under.lock();
        own::map_over(self.address, self.len, libc::PROT_READ, range).map_err(|error| ("mmap", error))?;
        self.is_read_only.store(true, Ordering::Release);
        self.is_gone.store(false, Ordering::Release);
        // No page of it is known to be absent, and no file is known to be given back to.
        Ok(std::mem::replace(&mut *under, Under { kind: Kind::File, file: None }))
    }

    /// What [`Mapping::show`] has mapped is the mapping's own from now on, and writable.
    pub(crate) fn keep(&self, under: Under) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        own::make_writable(self.address, self.len).map_err(|error| ("mprotect", error))?;
        *self.under.lock() = under;
        self.is_read_only.store(false, Ordering::Release);
        Ok(())
    }

    /// Undoes [`Mapping::show`]: `before` is there again. If the kernel refuses, the memory stays read-only.
    pub(crate) fn show_again(&self, before: Under) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let put_back = match &before.file {
            Some(file) => own::map_over(self.address, self.len, access, file),
            // There was none.
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

    /// Another process has the memory: this one lets go of it. Ordinary memory of the engine's own is followed by fresh memory of the
    /// same kind, and all other memory by none.
    pub(crate) fn let_go(&self, name: &str) -> Result<(), Failed> {
        let _pins = self.pins.lock();
        // Whatever fails from here on, nobody here accesses the memory.
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

    /// Whether other memory may come to its place.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.owner, Owner::Mapping)
    }
}
