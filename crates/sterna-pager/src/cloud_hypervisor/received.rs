//! The parts of a machine that have arrived.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};

use super::error::SessionError;
use super::layout::{MemoryLayout, Part, Slot};

/// A machine that arrives.
#[derive(Default)]
pub(super) struct Received {
    /// Number of each slot, and its memory.
    memory: Vec<(u32, File)>,
    pub(super) config: Vec<u8>,
    pub(super) state: Vec<u8>,
}

/// Memory in a part of a descriptor's file.
pub(super) struct Source<'a> {
    pub(super) file: &'a File,
    pub(super) name: String,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Received {
    /// Adds the memory of a slot.
    pub(super) fn add_memory(&mut self, slot: u32, descriptor: OwnedFd) -> Result<(), SessionError> {
        let refused = |why: String| SessionError::NotMemory { slot, why };
        let status =
            fstat(&descriptor).map_err(|error| refused(format!("cannot be examined (fstat: {error})")))?;
        // A read of anything else could block.
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(refused("is no memory: a memfd or a regular file is needed".to_owned()));
        }
        let flags =
            fcntl_getfl(&descriptor).map_err(|error| refused(format!("cannot be examined ({error})")))?;
        if flags.contains(OFlags::WRONLY) {
            return Err(refused("cannot be read".to_owned()));
        }
        self.memory.push((slot, descriptor.into()));
        Ok(())
    }

    /// The layout of the memory. Each slot has its memory.
    pub(super) fn layout(&self) -> Result<MemoryLayout, SessionError> {
        let layout = MemoryLayout::new(&self.config, &self.state)?;
        for slot in layout.slots() {
            let file = self.file(slot)?;
            let length = file.metadata().map_err(SessionError::system("fstat of the guest's memory"))?.len();
            if length < slot.file_bytes() {
                let needed = slot.file_bytes();
                let why = format!("has {length} bytes, but the configuration needs {needed}");
                return Err(SessionError::NotMemory { slot: slot.number, why });
            }
        }
        Ok(layout)
    }

    /// The memory in the order of the image.
    pub(super) fn parts(&self, layout: &MemoryLayout) -> Result<Vec<Source<'_>>, SessionError> {
        let source = |part: &Part| {
            let slot = &layout.slots()[part.slot];
            let name = format!("the memory of slot {} (descriptor of the VMM)", slot.number);
            Ok(Source { file: self.file(slot)?, name, offset: part.file_offset, bytes: part.bytes })
        };
        layout.parts().iter().map(source).collect()
    }

    fn file(&self, slot: &Slot) -> Result<&File, SessionError> {
        let found = self.memory.iter().find(|(number, _)| *number == slot.number);
        found.map(|(_, file)| file).ok_or(SessionError::NoMemory { slot: slot.number })
    }
}
