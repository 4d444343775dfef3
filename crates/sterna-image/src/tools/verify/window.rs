//! A verifier's access to a file: reads beyond the end return fewer bytes.

use crate::ImageError;
use crate::read::{ReadAt, Stamp};

pub(super) struct Window<'a> {
    pub(super) source: &'a dyn ReadAt,
    pub(super) name: &'a str,
    /// Length of the file in bytes.
    pub(super) length: u64,
}

impl<'a> Window<'a> {
    pub(super) fn new(source: &'a dyn ReadAt, name: &'a str) -> Result<Self, ImageError> {
        let length = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
        Ok(Self { source, name, length })
    }

    pub(super) fn stamp(&self) -> Result<Stamp, ImageError> {
        self.source.stamp().map_err(|error| ImageError::io(self.name, "fstat", error))
    }

    /// Reads up to `count` bytes from `offset`; fewer only at the end of the file.
    pub(super) fn get(&self, offset: u64, count: usize) -> Result<Vec<u8>, ImageError> {
        let rest = self.length.saturating_sub(offset);
        let mut bytes = vec![0; rest.min(count as u64) as usize];
        let mut done = 0;
        while done < bytes.len() {
            match self.source.read_at(offset + done as u64, &mut bytes[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) => return Err(ImageError::io(self.name, "read", error)),
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }
}

/// Decodes the big-endian integer of 4 bytes at `at`.
pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Decodes the big-endian integer of 8 bytes at `at`.
pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
