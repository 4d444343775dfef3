//! Makes an image in Sterna's own format out of the VM's stream.
//!
//! One thread reads the VM's pipe, and passes the stream through a second pipe to the converter, whose threads compress pages
//! while the VM writes. The image is complete under a temporary name before it gets its own.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Format, ImageError};

use super::piped::Stream;
use super::{SaveRequest, Settled};
use crate::DriveError;
use crate::pipe::pipe;

/// The image while it is written.
pub(super) struct Frames {
    path: PathBuf,
    staging: PathBuf,
    options: ConvertOptions,
    replace: bool,
}

impl Frames {
    pub(super) fn new(request: &SaveRequest) -> Self {
        let options = ConvertOptions {
            target: Some(Format::Sterna),
            frames: request.frames.clone(),
            replace: true,
            ..ConvertOptions::default()
        };
        let staging = staging(&request.path);
        Self { path: request.path.clone(), staging, options, replace: request.replace }
    }

    /// What the thread that reads the pipe does.
    pub(super) fn work(&self) -> Box<dyn FnOnce(Stream) -> Result<(), ImageError> + Send> {
        let (options, staging, path) = (self.options.clone(), self.staging.clone(), self.path.clone());
        let replace = self.replace;
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
                    (Ok(_), passed) => passed,
                    (Err(_), Err(passed)) if !is_closed(&passed) => Err(passed),
                    (Err(error), _) => Err(error),
                }
            })
        })
    }

    /// Gives the image its name.
    pub(super) fn settle(&mut self) -> Result<Settled, DriveError> {
        use std::os::unix::fs::MetadataExt;
        let failed = |doing, error| DriveError::file(doing, &self.path, error);
        let metadata = self.staging.metadata().map_err(|error| failed("read", error))?;
        sterna_image::publish(&self.staging, &self.path, self.replace).map_err(ImageError::from)?;
        Ok(Settled { file_bytes: metadata.len(), allocated_bytes: metadata.blocks() * 512, is_direct: false })
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // After a success the file has another name, and nothing is removed.
        let _ = std::fs::remove_file(&self.staging);
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
