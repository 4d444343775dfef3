//! What all packets start with (`specs/stream.md §3.3`).

use super::{DEVICE_STATE_PACKET_BYTES, RAM_PACKET_BYTES};
use super::{FLAG_DEVICE_STATE, FLAG_DIFFERENCES, FLAG_SYNC, MAGIC, METHOD_MASK, VERSION};
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/stream.md §3.3";

/// How pages look in the payload (`multifd-compression`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Method {
    /// As they are.
    #[default]
    None,
    /// One zlib stream for each channel.
    Zlib,
    /// One zstd frame for each channel.
    Zstd,
}

impl Method {
    /// QEMU's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Method::None => "none",
            Method::Zlib => "zlib",
            Method::Zstd => "zstd",
        }
    }

    /// Its bits in the flags.
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

/// Which packet follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketKind {
    /// Pages, or a SYNC.
    Ram {
        /// What the method bits say.
        method: Method,
        /// Whether it is the SYNC of a round.
        sync: bool,
        /// Whether its payload holds differences (`specs/extension.md §10`), which a QEMU never sends.
        differences: bool,
    },
    /// A device's state.
    DeviceState,
}

impl PacketKind {
    /// Bytes of the packet from its magic on, without the payload.
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
    /// Which packet it starts.
    pub kind: PacketKind,
}

impl PacketHeader {
    /// Reads it from the start of `buf`, leaving it there: the packet's own decoder wants it, too.
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
                return Err(r.bad(SPEC, format!("flags {flags:#x} hold an unknown bit")));
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
