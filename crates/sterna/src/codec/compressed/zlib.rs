//! zlib: one stream per channel, with a sync flush after each payload; the stream is never finished.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::{Decoder, Encoder, bad, corrupt};
use crate::error::{BadPayload, MigrationError};

pub(super) struct ZlibEncoder(Compress);

impl ZlibEncoder {
    pub(super) fn new(level: u8) -> Self {
        Self(Compress::new(Compression::new(u32::from(level.min(9))), true))
    }
}

impl Encoder for ZlibEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MigrationError> {
        let before = self.0.total_in();
        loop {
            out.reserve(pages.len() / 4 + 1024);
            let done = (self.0.total_in() - before) as usize;
            let status = self
                .0
                .compress_vec(&pages[done..], out, FlushCompress::Sync)
                .map_err(|error| MigrationError::Internal(format!("zlib: {error}")))?;
            let all_in = (self.0.total_in() - before) as usize == pages.len();
            // A sync flush is complete only if output space is left after it.
            if all_in && out.len() < out.capacity() && status != Status::StreamEnd {
                return Ok(());
            }
        }
    }
}

pub(super) struct ZlibDecoder(Decompress);

impl ZlibDecoder {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }
}

impl Decoder for ZlibDecoder {
    fn decode(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), MigrationError> {
        let (read, written) = (self.0.total_in(), self.0.total_out());
        loop {
            let (used, filled) = self.progress(read, written);
            if filled == pages.len() {
                break;
            }
            let status = self
                .0
                .decompress(&payload[used..], &mut pages[filled..], FlushDecompress::Sync)
                .map_err(|error| corrupt("zlib", error))?;
            if self.progress(read, written) == (used, filled) || status == Status::StreamEnd {
                return Err(bad("zlib", BadPayload::Short { came: filled, due: pages.len() }));
            }
        }
        self.drain(&payload[self.progress(read, written).0..])
    }
}

impl ZlibDecoder {
    fn progress(&self, read: u64, written: u64) -> (usize, usize) {
        ((self.0.total_in() - read) as usize, (self.0.total_out() - written) as usize)
    }

    /// Reads the flush mark after the last page. An error if further bytes decompress.
    fn drain(&mut self, mut rest: &[u8]) -> Result<(), MigrationError> {
        let mut spare = [0; 1];
        while !rest.is_empty() {
            let (read, written) = (self.0.total_in(), self.0.total_out());
            let status = self.0.decompress(rest, &mut spare, FlushDecompress::Sync);
            let (used, extra) = self.progress(read, written);
            if extra > 0 {
                return Err(bad("zlib", BadPayload::Long));
            }
            match status {
                Ok(Status::Ok) if used > 0 => rest = &rest[used..],
                Ok(_) => return Err(bad("zlib", BadPayload::LeftOver { bytes: rest.len() })),
                Err(error) => return Err(corrupt("zlib", error)),
            }
        }
        Ok(())
    }
}
