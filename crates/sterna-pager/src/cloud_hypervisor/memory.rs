//! The guest's memory as files that the VMM maps.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use super::layout::{MemoryLayout, Slot};

/// A memfd for each slot of the layout.
pub(super) struct GuestMemory {
    files: Vec<File>,
}

impl GuestMemory {
    /// Makes empty memory.
    pub(super) fn new(layout: &MemoryLayout) -> io::Result<Self> {
        let make = |slot: &Slot| {
            let name = format!("sterna-slot-{}", slot.number);
            let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
            file.set_len(slot.file_bytes())?;
            Ok(file)
        };
        Ok(Self { files: layout.slots().iter().map(make).collect::<io::Result<_>>()? })
    }

    /// The file of a slot, by its index.
    pub(super) fn file(&self, slot: usize) -> &File {
        &self.files[slot]
    }

    /// Writes bytes of the image's memory to their places. Each page becomes visible with its whole content, because it is
    /// locked while the kernel copies it.
    pub(super) fn write(&self, layout: &MemoryLayout, offset: u64, content: &[u8]) -> io::Result<()> {
        for part in layout.at_offset(offset, content.len() as u64) {
            let from = (part.offset - offset) as usize;
            let content = &content[from..from + part.bytes as usize];
            self.files[part.slot].write_all_at(content, part.file_offset)?;
        }
        Ok(())
    }

    /// Makes pages of zeros where there are none. Existing pages keep their content.
    pub(super) fn allocate(&self, slot: usize, file_offset: u64, bytes: u64) -> io::Result<()> {
        Ok(fallocate(&self.files[slot], FallocateFlags::empty(), file_offset, bytes)?)
    }
}
