//! A chunk of a device's stream: what the payload of a device-state packet begins with (`specs/stream.md §3.8`,
//! `specs/extension.md §8`).

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "chunk of a device's stream";
const SPEC: &str = "specs/stream.md §3.8";
const VERSION: u32 = 0;
const FLAG_CONFIGURATION: u32 = 0x1;
const FLAG_INITIAL_ENDS: u32 = 0x2;
const FLAG_TOTAL: u32 = 0x4;

/// The head of a chunk; its bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceChunk {
    /// Place in the device's stream, from 0 without a gap; the configuration comes last.
    pub index: u32,
    /// What it carries.
    pub kind: DeviceChunkKind,
}

/// What a chunk carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChunkKind {
    /// Bytes of the stream.
    Data {
        /// The initial bytes end with it (only between two Sternas).
        initial_ends: bool,
    },
    /// What the device needs last.
    Configuration {
        /// How many bytes the stream had before it (only between two Sternas).
        total_bytes: Option<u64>,
    },
}

impl DeviceChunk {
    /// Most bytes on the wire.
    pub const MAX_BYTES: usize = 20;

    /// Appends the bytes on the wire.
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

    /// Reads one from the start of a payload: the head and how many bytes it took.
    ///
    /// # Errors
    /// Another version, flags that are unknown or contradict each other, a payload that is too short.
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
                flags => return Err(r.bad(SPEC, format!("flags {flags:#x} are none of a chunk's"))),
            };
            Ok(Self { index, kind })
        })?;
        read.ok_or_else(|| {
            let rule = format!("{} bytes are fewer than its head has", payload.len());
            WireError::misbehaved(MESSAGE, payload.len() as u64, SPEC, rule)
        })
    }
}
