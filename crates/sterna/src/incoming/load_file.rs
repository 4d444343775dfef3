//! The file from which a guest is loaded.

use std::sync::Arc;

use sterna_transport::{Address, OpenOptions, PageFile};

use crate::params::Parameters;
use crate::start_error::StartError;

/// An opened file, and the position of the stream in it.
pub(super) struct LoadFile {
    pub file: Arc<PageFile>,
    /// Byte offset of the stream's first byte.
    pub offset: u64,
}

impl LoadFile {
    /// Opens the file if `at` is a file address.
    pub(super) fn open(at: &Address, params: &Parameters) -> Result<Option<Self>, StartError> {
        let Address::File { path, offset } = at else { return Ok(None) };
        let options = OpenOptions { direct: params.direct_io };
        let file = PageFile::open(path, options).map_err(StartError::system)?;
        Ok(Some(LoadFile { file: Arc::new(file), offset: *offset }))
    }
}
