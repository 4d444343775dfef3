//! The header that starts every packet after the initial one (`specs/stream.md §3.3`).

use super::layout::{DEVICE_STATE_PACKET_BYTES, RAM_PACKET_BYTES};
use super::layout::{FLAG_DEVICE_STATE, FLAG_DIFFERENCES, FLAG_SYNC, METHOD_MASK};
use super::layout::{MAGIC, VERSION};
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/stream.md §3.3";

/// Compression of the pages in the payload (`multifd-compression`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Method {
    /// Pages are sent uncompressed.
    #[default]
    None,
    /// One zlib stream for each channel.
    Zlib,
    /// One zstd frame for each channel.
    Zstd,
}

impl Method {
    /// QEMU's name for the method.
    pub fn name(self) -> &'static str {
        match self {
            Method::None => "none",
            Method::Zlib => "zlib",
            Method::Zstd => "zstd",
        }
    }

    /// The method's bits in the flags of a packet.
    pub(super) fn flags(self) -> u32 {
        match self {
            Method::None => 0,
            Method::Zlib => 0x02,
            Method::Zstd => 0x04,
        }
    }

    fn from_flags(bits: u32) -> Option<Self> {
        match bits & METHOD_MASK {
            0 => Some(Method::None),
            0x02 => Some(Method::Zlib),
            0x04 => Some(Method::Zstd),
            _ => None,
        }
    }
}

/// Kind of the packet that a header starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketKind {
    /// Pages, or a SYNC.
    Ram {
        /// The method that the flags state.
        method: Method,
        /// Whether the packet is the SYNC of a round.
        sync: bool,
        /// Whether the payload has differences (`specs/extension.md §10`). QEMU never sends them.
        differences: bool,
    },
    /// A piece of a device's state.
    DeviceState,
}

impl PacketKind {
    /// Length of the packet from its magic, without the payload, in bytes.
    pub fn packet_bytes(self) -> usize {
        match self {
            PacketKind::Ram { .. } => RAM_PACKET_BYTES,
            PacketKind::DeviceState => DEVICE_STATE_PACKET_BYTES,
        }
    }
}

/// The twelve bytes at the start of each packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketHeader {
    /// Kind of the packet.
    pub kind: PacketKind,
}

impl PacketHeader {
    /// Reads the header without consuming it; `None` while bytes are missing.
    ///
    /// The packet's own decoder reads the same bytes again.
    ///
    /// # Errors
    /// A wrong magic or version, an unknown flag or method, SYNC in a device-state packet.
    pub fn peek(buf: &[u8]) -> Result<Option<Self>, WireError> {
        let decoded = reader::decode(buf, "multifd packet", |r| {
            if r.u32()? != MAGIC {
                return Err(r.bad(SPEC, "the magic is not 11 22 33 44"));
            }
            let version = r.u32()?;
            if version != VERSION {
                return Err(r.unfit(SPEC, format!("version {version}, only {VERSION} is known")));
            }
            let flags = r.u32()?;
            if flags & !(FLAG_SYNC | FLAG_DEVICE_STATE | METHOD_MASK | FLAG_DIFFERENCES) != 0 {
                return Err(r.bad(SPEC, format!("flags {flags:#x} contain an unknown bit")));
            }
            if flags & FLAG_DEVICE_STATE != 0 {
                if flags != FLAG_DEVICE_STATE {
                    return Err(r.bad("specs/stream.md §3.8", "DEVICE_STATE excludes every other flag"));
                }
                return Ok(PacketKind::DeviceState);
            }
            let differences = flags & FLAG_DIFFERENCES != 0;
            if differences && flags != FLAG_DIFFERENCES {
                return Err(r.bad(super::differences::SPEC, "differences exclude every other flag"));
            }
            let Some(method) = Method::from_flags(flags) else {
                let rule = format!("compression method {:#x} is not none, zlib or zstd", flags & METHOD_MASK);
                return Err(r.unfit(SPEC, rule));
            };
            Ok(PacketKind::Ram { method, sync: flags & FLAG_SYNC != 0, differences })
        })?;
        Ok(decoded.map(|(kind, _)| Self { kind }))
    }
}
