//! Into what image a reception goes.

use std::path::PathBuf;

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{MappedOptions, MappedWriter, Shape};

use crate::error::MigrationError;

/// Where a machine is put that is received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlan {
    /// The image's place.
    pub path: PathBuf,
    /// How it is made: direct I/O, replacing what is there, libvirt's container around it.
    pub options: MappedOptions,
    /// The form that it gets in the end, if that is not mapped-ram: pages come in any order, so they are gathered in
    /// a mapped-ram image beside its place, which is converted before the source is told that all is well.
    pub convert: Option<ConvertOptions>,
}

impl ImagePlan {
    /// Begins the image of a machine whose RAM is known.
    pub(crate) fn begin(&self, shape: &Shape) -> Result<MappedWriter, MigrationError> {
        Ok(MappedWriter::create(&self.path, shape, self.options.clone())?)
    }

    /// Makes durable, as a staging file, what is known of the machine.
    pub(crate) fn keep(&self, writer: &MappedWriter, shape: &Shape) -> Result<(), MigrationError> {
        Ok(writer.fill_in(shape)?)
    }

    /// Puts the image in its place. `anew`: more is known than when it was made durable.
    pub(crate) fn complete(
        &self,
        writer: &MappedWriter,
        shape: &Shape,
        anew: bool,
    ) -> Result<(), MigrationError> {
        if anew {
            self.keep(writer, shape)?;
        }
        let Some(options) = &self.convert else {
            return writer.file().publish().map_err(MigrationError::storage);
        };
        let Some(staging) = writer.file().staging_path() else {
            return Err(MigrationError::Internal("what is to be converted has left its place".to_owned()));
        };
        // What the source sent is kept as it came: to refuse it now would leave nothing.
        let options = &ConvertOptions { force_damaged: true, ..options.clone() };
        convert(Input::File(staging), Output::File(self.path.clone()), options)?;
        Ok(())
    }
}

/// Most RAM that an opaque machine may have, in bytes: its bitmaps are kept in memory.
pub const RAM_BYTES: u64 = 16 << 40;
