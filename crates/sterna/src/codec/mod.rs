//! Encodes pages for multifd channels (specs/stream.md §3.4): raw, or as one compressed stream per channel. A
//! compressed stream lasts for the whole migration.
//!
//! A compressor's input must not change while it reads, so pages are copied out of guest RAM first.

#[cfg(feature = "multifd-compression")]
mod compressed;
#[cfg(not(feature = "multifd-compression"))]
#[path = "off.rs"]
mod compressed;

use sterna_wire::multifd::Method;

use crate::error::MigrationError;
use crate::params::{Compression, Parameters};

/// The compression method that multifd packets of a channel name.
pub(crate) fn method(compression: Compression) -> Method {
    match compression {
        Compression::None => Method::None,
        Compression::Zlib => Method::Zlib,
        Compression::Zstd => Method::Zstd,
    }
}

/// Compresses the payloads of one channel.
pub(crate) trait Encoder: Send {
    /// Compresses `pages` as the next, flushed piece of the channel's stream. Appends it to `out`.
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MigrationError>;
}

/// Decompresses the payloads of one channel.
pub(crate) trait Decoder: Send {
    /// Fills `pages` from one payload, whose decompressed length must be exactly that of `pages`.
    fn decode(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), MigrationError>;
}

/// Creates the encoder that `params` select; `None` for raw pages.
pub(crate) fn encoder(params: &Parameters) -> Result<Option<Box<dyn Encoder>>, MigrationError> {
    match params.multifd_compression {
        Compression::None => Ok(None),
        _ => compressed::encoder(params),
    }
}

/// Creates the decoder for a channel compressed with `compression`; `None` for raw pages.
pub(crate) fn decoder(compression: Compression) -> Result<Option<Box<dyn Decoder>>, MigrationError> {
    match compression {
        Compression::None => Ok(None),
        compression => compressed::decoder(compression),
    }
}
