//! No compression, because the feature `multifd-compression` is off. The rules refuse settings that need it.

use super::{Decoder, Encoder};
use crate::error::MigrationError;
use crate::params::{Compression, Parameters};

pub(super) fn encoder(_: &Parameters) -> Result<Option<Box<dyn Encoder>>, MigrationError> {
    Err(off())
}

pub(super) fn decoder(_: Compression) -> Result<Option<Box<dyn Decoder>>, MigrationError> {
    Err(off())
}

fn off() -> MigrationError {
    MigrationError::Internal("compressed pages without the Cargo feature multifd-compression".to_owned())
}
