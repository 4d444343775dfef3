//! Makes an image in Sterna's own format out of the VM's stream.
//!
//! One thread reads the VM's pipe, and passes the stream through a second pipe to the converter, whose threads compress pages
//! while the VM writes. The image is complete under a temporary name before it gets its own.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Format, ImageError, ImagePlace, publish};

use super::stream::Stream;
use super::{SaveRequest, Settled};
use crate::DriveError;
use crate::pipe::pipe;

/// The image while it is written.
pub(crate) struct Frames {
    path: PathBuf,
    staging: PathBuf,
    options: ConvertOptions,
    replace: bool,
    /// The image goes into a store or an object storage, which makes it visible at its end.
    is_in_store: bool,
    /// Length of the image in bytes, when it is complete.
    length: Arc<AtomicU64>,
}

impl Frames {
    pub(crate) fn new(request: &SaveRequest) -> Self {
        let is_in_store = !matches!(ImagePlace::parse(&request.path), Ok(ImagePlace::File(_)));
        let options = ConvertOptions {
            target: Some(Format::Sterna),
            frames: request.frames.clone(),
            replace: request.replace || !is_in_store,
            ..ConvertOptions::default()
        };
        let staging = if is_in_store { request.path.clone() } else { staging(&request.path) };
        Self {
            path: request.path.clone(),
            staging,
            options,
            replace: request.replace,
            is_in_store,
            length: Arc::default(),
        }
    }

    /// What the thread that reads the pipe does.
    pub(crate) fn work(&self) -> Box<dyn FnOnce(Stream) -> Result<(), ImageError> + Send> {
        let (options, staging, path) = (self.options.clone(), self.staging.clone(), self.path.clone());
        let (replace, length) = (self.replace, Arc::clone(&self.length));
        Box::new(move |mut stream| {
            if !replace && path.symlink_metadata().is_ok() {
                return Err(ImageError::Exists { file: path.display().to_string() });
            }
            let made = pipe();
            let (theirs, ours) = made.map_err(|error| ImageError::Request(error.to_string()))?;
            std::thread::scope(|scope| {
                let input = Input::Pipe(Box::new(File::from(theirs)));
                let converting = scope.spawn(move || convert(input, Output::File(staging), &options));
                let mut out = File::from(ours);
                let passed = stream.pass(&mut |bytes| out.write_all(bytes));
                // The converter ends when the pipe is closed.
                drop(out);
                let converted = converting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                // An error of the converter closes its pipe, so that its error is the cause of both.
                match (converted, passed) {
                    (Ok(converted), passed) => {
                        length.store(converted.target_bytes, Ordering::Relaxed);
                        passed
                    }
                    (Err(_), Err(passed)) if !is_closed(&passed) => Err(passed),
                    (Err(error), _) => Err(error),
                }
            })
        })
    }

    /// Gives the image its name.
    pub(crate) fn settle(&mut self) -> Result<Settled, DriveError> {
        use std::os::unix::fs::MetadataExt;
        let file_bytes = self.length.load(Ordering::Relaxed);
        let mut allocated_bytes = file_bytes;
        if !self.is_in_store {
            let metadata = self.staging.metadata();
            let metadata = metadata.map_err(|error| DriveError::file("read", &self.path, error))?;
            allocated_bytes = metadata.blocks() * 512;
            publish(&self.staging, &self.path, self.replace).map_err(ImageError::from)?;
        }
        Ok(Settled { file_bytes, allocated_bytes, is_direct: false })
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // After a success the file has another name, and nothing is removed.
        if !self.is_in_store {
            let _ = std::fs::remove_file(&self.staging);
        }
    }
}

fn is_closed(error: &ImageError) -> bool {
    matches!(error, ImageError::Io { source, .. } if source.kind() == std::io::ErrorKind::BrokenPipe)
}

/// A name next to `path` for this process.
fn staging(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.sterna-save", std::process::id()))
}
