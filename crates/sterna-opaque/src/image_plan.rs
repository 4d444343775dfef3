//! The image that a reception writes: place, options and form.

use std::path::PathBuf;

use sterna::error::MigrationError;
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::spool;
use sterna_image::{ImagePlace, MappedOptions, MappedWriter, Shape};

use super::failure::image_failed;

/// The image into which a machine is received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlan {
    /// Path of the image.
    pub path: PathBuf,
    /// Options for creating the image: direct I/O, replacing an existing file, libvirt's container.
    pub options: MappedOptions,
    /// Final form of the image, if it is not mapped-ram. Pages arrive in any order, so they are first written to a
    /// mapped-ram staging file in the same directory, or in `$TMPDIR` for a store or an object storage. It is converted before the source receives the success.
    pub convert: Option<ConvertOptions>,
}

impl ImagePlan {
    /// Creates the image of a machine whose RAM blocks are known.
    #[doc(hidden)]
    pub fn begin(&self, shape: &Shape) -> Result<MappedWriter, MigrationError> {
        // A store or an object storage gets the image when it is converted. Until then it is in a local staging file.
        let path = match ImagePlace::is_elsewhere(&self.path) {
            true => spool::default_directory().join(format!("sterna-received-{}", std::process::id())),
            false => self.path.clone(),
        };
        MappedWriter::create(&path, shape, self.options.clone()).map_err(image_failed)
    }

    /// Writes the machine's description to the staging file and makes the file durable.
    #[doc(hidden)]
    pub fn keep(&self, writer: &MappedWriter, shape: &Shape) -> Result<(), MigrationError> {
        writer.fill_in(shape).map_err(image_failed)
    }

    /// Renames the image to its place. `anew`: the description is more complete than when it was made durable.
    #[doc(hidden)]
    pub fn complete(&self, writer: &MappedWriter, shape: &Shape, anew: bool) -> Result<(), MigrationError> {
        if anew {
            self.keep(writer, shape)?;
        }
        let Some(options) = &self.convert else {
            return writer.file().publish().map_err(MigrationError::storage);
        };
        let Some(staging) = writer.file().staging_path() else {
            return Err(MigrationError::Internal("what is to be converted has left its place".to_owned()));
        };
        // The machine is kept as it was received. If damage were refused now, no copy of the guest would remain.
        let options = &ConvertOptions { force_damaged: true, ..options.clone() };
        convert(Input::File(staging), Output::File(self.path.clone()), options).map_err(image_failed)?;
        Ok(())
    }
}

/// Most RAM of an opaque machine, in bytes: 16 TiB, because its bitmaps are kept in memory.
pub const RAM_BYTES: u64 = 16 << 40;
