//! The file that a guest comes from.

use std::sync::Arc;

use sterna_transport::{Address, OpenOptions, PageFile};

use crate::params::{Capabilities, Compression, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;

/// The file that a guest comes from.
pub(super) struct LoadFile {
    pub file: Arc<PageFile>,
    /// Where the stream begins.
    pub offset: u64,
}

impl LoadFile {
    /// Opens the file, if `at` is one.
    pub(super) fn open(
        at: &Address,
        params: &Parameters,
        capabilities: &Capabilities,
    ) -> Result<Option<Self>, StartError> {
        let Address::File { path, offset } = at else {
            if capabilities.mapped_ram {
                return Err(SettingsError::MappedNeedsFile.into());
            }
            return Ok(None);
        };
        if capabilities.multifd && !capabilities.mapped_ram {
            return Err(SettingsError::FileIsOneChannel.into());
        }
        if params.tls.is_some() {
            return Err(SettingsError::FileHasNoTls.into());
        }
        if capabilities.mapped_ram && capabilities.multifd && params.multifd_compression != Compression::None
        {
            return Err(SettingsError::MappedIsUncompressed.into());
        }
        let options = OpenOptions { direct: params.direct_io };
        let file = PageFile::open(path, options).map_err(|error| StartError::System(error.to_string()))?;
        Ok(Some(LoadFile { file: Arc::new(file), offset: *offset }))
    }
}
