//! Sources of an image's bytes: a file, or memory (tests, fuzzing).

use crate::error::ImageError;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use sterna_store::StoredImage;

/// Random access to bytes. Short reads are allowed; 0 means that the offset is at or after the end.
pub trait ReadAt: Send + Sync {
    /// Reads into `to` from byte `offset`.
    ///
    /// # Errors
    /// An error of the system.
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize>;

    /// Length of the content in bytes.
    ///
    /// # Errors
    /// An error of the system.
    fn len_bytes(&self) -> io::Result<u64>;

    /// A stamp that detects changes: equal stamps mean equal content.
    ///
    /// # Errors
    /// An error of the system.
    fn stamp(&self) -> io::Result<Stamp>;

    /// Whether unrelated bytes can follow the image, as on a longer device.
    fn ends_anywhere(&self) -> bool {
        false
    }

    /// The image in Sterna's own format that makes these bytes; none for other formats.
    fn stored(&self) -> Option<&Arc<StoredImage>> {
        None
    }

    /// The underlying file, for reflinks and holes; none without a file.
    fn file(&self) -> Option<&File> {
        None
    }
}

/// Size and modification time of a file at one moment.
///
/// The time of a change of name or mode (ctime) is left out, because a file with another name has the same content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stamp {
    length_bytes: u64,
    modified: (i64, i64),
}

impl ReadAt for File {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match FileExt::read_at(self, to, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn stamp(&self) -> io::Result<Stamp> {
        let metadata = self.metadata()?;
        Ok(Stamp { length_bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) })
    }

    fn file(&self) -> Option<&File> {
        Some(self)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.get(at..)).unwrap_or_default();
        let count = rest.len().min(to.len());
        to[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        Ok(Stamp::default())
    }
}

/// A source that is read front to back. Some sources can also jump.
pub(crate) trait Input: Send {
    /// Reads the next bytes; returns 0 at the end.
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize>;

    /// Continues at byte `position`. Returns false if the source cannot jump.
    fn jump(&mut self, position: u64) -> bool;
}

/// Reads a [`ReadAt`] front to back.
pub(crate) struct Sequential {
    source: Arc<dyn ReadAt>,
    position: u64,
}

impl Sequential {
    pub(crate) fn new(source: Arc<dyn ReadAt>, position: u64) -> Self {
        Self { source, position }
    }
}

impl Input for Sequential {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read_at(self.position, to)?;
        self.position += count as u64;
        Ok(count)
    }

    fn jump(&mut self, position: u64) -> bool {
        self.position = position;
        true
    }
}

impl io::Read for Sequential {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        Input::read(self, to)
    }
}

/// Adapts any reader to an [`Input`] that cannot jump.
pub(crate) struct Piped<R>(pub(crate) R);

impl<R: io::Read + Send> Input for Piped<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(to) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    fn jump(&mut self, _: u64) -> bool {
        false
    }
}

/// Fills `to` with the bytes from offset `offset`.
pub(crate) fn read_exact(
    source: &dyn ReadAt,
    file: &str,
    offset: u64,
    to: &mut [u8],
    what: &'static str,
) -> Result<(), ImageError> {
    let mut done = 0;
    while done < to.len() {
        match source.read_at(offset + done as u64, &mut to[done..]) {
            Ok(0) => {
                return Err(ImageError::Torn { file: file.to_owned(), offset: offset + done as u64, what });
            }
            Ok(count) => done += count,
            Err(error) => return Err(ImageError::io(file, "read", error)),
        }
    }
    Ok(())
}
