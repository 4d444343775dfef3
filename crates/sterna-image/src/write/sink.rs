//! A file that is written front to back: legacy streams, compressed or not.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use sterna_transport::{CreateOptions, IoPart, PageFile, PageQueue, QueueOptions};

use super::Envelope;
use crate::ImageError;
use crate::model::{Compression, Form, Shape};

/// A file for a stream, in libvirt's container or bare. Absent from its place until [`complete`](Self::complete).
pub struct FileSink {
    file: Arc<PageFile>,
    queue: PageQueue,
    position: u64,
    envelope: Option<(Envelope, Compression)>,
}

impl FileSink {
    /// Begins a file for `path`; the stream will be compressed by `compression`.
    ///
    /// # Errors
    /// [`ImageError`]; nothing is left behind.
    pub fn create(
        path: &Path,
        options: CreateOptions,
        envelope: Option<Envelope>,
        compression: Compression,
    ) -> Result<Self, ImageError> {
        let file = Arc::new(PageFile::create(path, options)?);
        let mut position = 0;
        if let Some(envelope) = &envelope {
            let (bytes, offset) = envelope.bytes(Form::Legacy, compression, None)?;
            file.write_at(0, &[IoPart::Bytes(&bytes)])?;
            position = offset;
        }
        let queue = PageQueue::new(&file, QueueOptions::default());
        Ok(Self { file, queue, position, envelope: envelope.map(|envelope| (envelope, compression)) })
    }

    /// Syncs, marks it complete, and puts the file in its place. `shape` is that of the stream. Gives
    /// the file's length in bytes.
    ///
    /// # Errors
    /// [`ImageError::File`]: the place is as it was.
    pub fn complete(mut self, shape: &Shape) -> Result<u64, ImageError> {
        self.queue.drain()?;
        self.file.sync()?;
        if let Some((envelope, compression)) = &self.envelope {
            let (bytes, _) = envelope.bytes(Form::Legacy, *compression, Some(shape))?;
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
