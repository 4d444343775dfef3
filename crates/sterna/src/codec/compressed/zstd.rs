//! zstd: one frame per channel, flushed after each payload; the frame is never ended.

use zstd::stream::raw::{Decoder as RawDecoder, Encoder as RawEncoder, InBuffer, Operation, OutBuffer};

use super::{Decoder, Encoder, bad, corrupt};
use crate::error::{BadPayload, MigrationError};

pub(super) struct ZstdEncoder(RawEncoder<'static>);

impl ZstdEncoder {
    pub(super) fn new(level: u8) -> Result<Self, MigrationError> {
        RawEncoder::new(i32::from(level)).map(Self).map_err(ours)
    }
}

impl Encoder for ZstdEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MigrationError> {
        let mut input = InBuffer::around(pages);
        while input.pos() < pages.len() {
            with_room(out, pages.len(), |output| self.0.run(&mut input, output).map(drop)).map_err(ours)?;
        }
        loop {
            let mut left = 0;
            with_room(out, pages.len(), |output| {
                left = self.0.flush(output)?;
                Ok(())
            })
            .map_err(ours)?;
            if left == 0 {
                return Ok(());
            }
        }
    }
}

pub(super) struct ZstdDecoder(RawDecoder<'static>);

impl ZstdDecoder {
    pub(super) fn new() -> Result<Self, MigrationError> {
        let mut decoder = RawDecoder::new().map_err(ours)?;
        let limit = zstd::zstd_safe::DParameter::WindowLogMax(sterna_wire::limits::ZSTD_WINDOW_LOG);
        decoder.set_parameter(limit).map_err(ours)?;
        Ok(Self(decoder))
    }
}

impl Decoder for ZstdDecoder {
    fn decode(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), MigrationError> {
        let due = pages.len();
        let mut input = InBuffer::around(payload);
        let mut output = OutBuffer::around(pages);
        while output.pos() < due {
            let before = (input.pos(), output.pos());
            let hint = self.0.run(&mut input, &mut output).map_err(|error| corrupt("zstd", error))?;
            if hint == 0 {
                return Err(bad("zstd", BadPayload::FrameEnds));
            }
            if (input.pos(), output.pos()) == before {
                return Err(bad("zstd", BadPayload::Short { came: output.pos(), due }));
            }
        }
        self.drain(input)
    }
}

impl ZstdDecoder {
    /// Reads the remaining input of the flushed block. An error if further bytes decompress.
    fn drain(&mut self, mut input: InBuffer<'_>) -> Result<(), MigrationError> {
        let mut spare = [0; 1];
        loop {
            let before = input.pos();
            let mut output = OutBuffer::around(&mut spare[..]);
            self.0.run(&mut input, &mut output).map_err(|error| corrupt("zstd", error))?;
            if output.pos() > 0 {
                return Err(bad("zstd", BadPayload::Long));
            }
            if input.pos() == input.src.len() {
                return Ok(());
            }
            if input.pos() == before {
                return Err(bad("zstd", BadPayload::LeftOver { bytes: input.src.len() - input.pos() }));
            }
        }
    }
}

/// Lets `step` write after the bytes that `out` contains.
fn with_room(
    out: &mut Vec<u8>,
    room: usize,
    step: impl FnOnce(&mut OutBuffer<'_, [u8]>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let start = out.len();
    out.resize(start + room + 1024, 0);
    let mut output = OutBuffer::around(&mut out[start..]);
    let result = step(&mut output);
    let written = output.pos();
    out.truncate(start + written);
    result
}

fn ours(error: std::io::Error) -> MigrationError {
    MigrationError::Internal(format!("zstd: {error}"))
}
