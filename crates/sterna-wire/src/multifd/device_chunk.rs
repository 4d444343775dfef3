//! The head of a chunk of a device stream (`specs/stream.md §3.8`, `specs/extension.md §8`).
//!
//! It is at the start of a device-state packet's payload, so that the destination can restore the order of
//! chunks that several channels carry.

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "chunk of a device's stream";
const SPEC: &str = "specs/stream.md §3.8";
const VERSION: u32 = 0;
const FLAG_CONFIGURATION: u32 = 0x1;
const FLAG_INITIAL_ENDS: u32 = 0x2;
const FLAG_TOTAL: u32 = 0x4;

/// The head of a chunk. The chunk's bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceChunk {
    /// Position in the device stream, from 0 without a gap. The configuration has the last index.
    pub index: u32,
    /// Purpose of the chunk.
    pub kind: DeviceChunkKind,
}

/// Purpose of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChunkKind {
    /// Bytes of the device stream.
    Data {
        /// Whether the initial bytes end with this chunk (only between two Sternas).
        initial_ends: bool,
    },
    /// The device's final state, which it loads after all data.
    Configuration {
        /// Number of stream bytes before this chunk (only between two Sternas).
        total_bytes: Option<u64>,
    },
}

impl DeviceChunk {
    /// Longest head on the wire, in bytes.
    pub const MAX_BYTES: usize = 20;

    /// Appends the head as it is on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (flags, total) = match self.kind {
            DeviceChunkKind::Data { initial_ends: false } => (0, None),
            DeviceChunkKind::Data { initial_ends: true } => (FLAG_INITIAL_ENDS, None),
            DeviceChunkKind::Configuration { total_bytes: None } => (FLAG_CONFIGURATION, None),
            DeviceChunkKind::Configuration { total_bytes } => (FLAG_CONFIGURATION | FLAG_TOTAL, total_bytes),
        };
        for word in [VERSION, self.index, flags] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        if let Some(total) = total {
            out.extend_from_slice(&total.to_be_bytes());
        }
    }

    /// Reads one head from the start of a payload. Returns the head and its length in bytes.
    ///
    /// # Errors
    /// Another version; flags that are unknown or contradict each other; a payload that is too short.
    pub fn decode(payload: &[u8]) -> Result<(Self, usize), WireError> {
        let read = reader::decode(payload, MESSAGE, |r| {
            let version = r.u32()?;
            if version != VERSION {
                return Err(r.unfit(SPEC, format!("version {version}, only {VERSION} is known")));
            }
            let index = r.u32()?;
            let kind = match r.u32()? {
                0 => DeviceChunkKind::Data { initial_ends: false },
                FLAG_INITIAL_ENDS => DeviceChunkKind::Data { initial_ends: true },
                FLAG_CONFIGURATION => DeviceChunkKind::Configuration { total_bytes: None },
                flags if flags == FLAG_CONFIGURATION | FLAG_TOTAL => {
                    DeviceChunkKind::Configuration { total_bytes: Some(r.u64()?) }
                }
                flags => return Err(r.bad(SPEC, format!("flags {flags:#x} are not valid for a chunk"))),
            };
            Ok(Self { index, kind })
        })?;
        read.ok_or_else(|| {
            let rule = format!("{} bytes are fewer than its head has", payload.len());
            WireError::misbehaved(MESSAGE, payload.len() as u64, SPEC, rule)
        })
    }
}
