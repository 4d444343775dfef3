//! The output of a stream: compressed or not, to a file or a pipe.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::CreateOptions;

use crate::ImageError;
use crate::compression::Compressor;
use crate::format::{Compression, Format};
use crate::model::Shape;
use crate::write::{Envelope, FileSink, failed};

/// The output of a stream, with its compressor.
pub(super) struct Out {
    compressor: Compressor<Below>,
}

enum Below {
    File(Box<FileSink>),
    Pipe(Box<dyn Write + Send>),
}

impl Out {
    pub(super) fn file(
        path: &Path,
        options: CreateOptions,
        format: Format,
        envelope: Option<Envelope>,
        threads: usize,
    ) -> Result<Self, ImageError> {
        let sink = FileSink::create(path, options, format, envelope)?;
        Ok(Self { compressor: Compressor::new(Below::File(Box::new(sink)), format.compression(), threads) })
    }

    pub(super) fn pipe(pipe: Box<dyn Write + Send>, compression: Compression, threads: usize) -> Self {
        Self { compressor: Compressor::new(Below::Pipe(pipe), compression, threads) }
    }

    /// Ends the stream and publishes the file. Returns the file's length in bytes; 0 for a pipe.
    pub(super) fn complete(self, shape: &Shape, name: &str) -> Result<u64, ImageError> {
        match self.compressor.finish().map_err(|error| failed(name, error))? {
            Below::File(sink) => sink.complete(shape),
            Below::Pipe(mut pipe) => {
                pipe.flush().map_err(|error| failed(name, error))?;
                Ok(0)
            }
        }
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.compressor.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.compressor.flush()
    }
}

impl Write for Below {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Below::File(sink) => sink.write(bytes),
            Below::Pipe(pipe) => pipe.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An output that the reader of the source writes to, and the conversion takes back.
#[derive(Clone)]
pub(super) struct Shared {
    out: Arc<Mutex<Option<Out>>>,
    /// The output's name. Errors carry it, so that they are not reported as errors of the source.
    name: Arc<str>,
}

impl Shared {
    pub(super) fn new(out: Out, name: &str) -> Self {
        Self { out: Arc::new(Mutex::new(Some(out))), name: name.into() }
    }

    /// Takes the output out, for its completion.
    pub(super) fn into_inner(self) -> Result<Out, ImageError> {
        let out = self.out.lock().take();
        out.ok_or_else(|| ImageError::Request("the output was taken before".to_owned()))
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = self.out.lock();
        let Some(out) = &mut *out else { return Err(io::ErrorKind::BrokenPipe.into()) };
        match out.write(bytes) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(io::Error::other(failed(&self.name, error)))
            }
            done => done,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
