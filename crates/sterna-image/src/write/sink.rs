//! A file that is written front to back: legacy streams, compressed or not.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use sterna_transport::{CreateOptions, IoPart, PageFile, PageQueue, QueueOptions};

use super::libvirt::Envelope;
use crate::error::ImageError;
use crate::format::Format;
use crate::model::Shape;

/// A file for a stream, in libvirt's container or bare.
///
/// The file is absent from its path until [`complete`](Self::complete).
pub struct FileSink {
    file: Arc<PageFile>,
    queue: PageQueue,
    position: u64,
    format: Format,
    envelope: Option<Envelope>,
}

impl FileSink {
    /// Starts a file for `path`. The caller must compress the stream as `format` requires.
    ///
    /// # Errors
    /// [`ImageError`]; no file is left.
    pub fn create(
        path: &Path,
        options: CreateOptions,
        format: Format,
        envelope: Option<Envelope>,
    ) -> Result<Self, ImageError> {
        let file = Arc::new(PageFile::create(path, options)?);
        let mut position = 0;
        if let Some(envelope) = &envelope {
            let (bytes, offset) = envelope.bytes(format, None)?;
            file.write_at(0, &[IoPart::Bytes(&bytes)])?;
            position = offset;
        }
        let queue = PageQueue::new(&file, QueueOptions::default());
        Ok(Self { file, queue, position, format, envelope })
    }

    /// Syncs the file, marks it complete, and publishes it. Returns the file's length in bytes.
    ///
    /// `shape` is the shape of the stream.
    ///
    /// # Errors
    /// [`ImageError::File`]: the path is unchanged.
    pub fn complete(mut self, shape: &Shape) -> Result<u64, ImageError> {
        self.queue.drain()?;
        self.file.sync()?;
        if let Some(envelope) = &self.envelope {
            let (bytes, _) = envelope.bytes(self.format, Some(shape))?;
            self.file.write_at(0, &[IoPart::Bytes(&bytes)])?;
            self.file.sync()?;
        }
        let length = self.file.len_bytes()?;
        self.file.publish()?;
        Ok(length)
    }
}

impl Write for FileSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.queue.write_bytes(self.position, bytes);
        written.map_err(|error| io::Error::other(ImageError::from(error)))?;
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
