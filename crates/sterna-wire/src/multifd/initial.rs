//! The first 64 bytes of a multifd connection (`specs/stream.md §3.2`).
//!
//! They identify the VM and the channel, because connections may arrive in any order.

use super::layout::{MAGIC, VERSION};
use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "multifd initial packet";
const SPEC: &str = "specs/stream.md §3.2";

/// Identifies a multifd connection: VM and channel number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitialPacket {
    /// UUID of the VM in RFC 4122 byte order, all zero without a UUID.
    pub uuid: [u8; 16],
    /// Number of the channel, from 0.
    pub id: u8,
}

impl InitialPacket {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 64;

    /// The packet as it is on the wire.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&VERSION.to_be_bytes());
        out[8..24].copy_from_slice(&self.uuid);
        out[24] = self.id;
        out
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_bytes());
    }

    /// Reads one packet from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or version; a reserved byte that is not zero.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            if r.u32()? != MAGIC {
                return Err(r.bad(SPEC, "the magic is not 11 22 33 44"));
            }
            let version = r.u32()?;
            if version != VERSION {
                return Err(r.unfit(SPEC, format!("version {version}, only {VERSION} is known")));
            }
            let uuid = r.array()?;
            let id = r.u8()?;
            if r.take(39)?.iter().any(|byte| *byte != 0) {
                return Err(r.bad(SPEC, "a reserved byte is not zero"));
            }
            Ok(Self { uuid, id })
        })
    }

    /// Compares the packet with this side's UUID (zero without one) and number of channels.
    ///
    /// The caller must check that no id occurs twice, because only the caller sees all connections.
    ///
    /// # Errors
    /// [`Fault::PeerIncompatible`](crate::Fault::PeerIncompatible) when the UUID differs or the id is too high.
    pub fn check(&self, uuid: &[u8; 16], channels: usize) -> Result<(), WireError> {
        if self.uuid != *uuid {
            let rule = "the VM's UUID differs from this side's: start both sides with the same UUID, or both without \
                        one";
            return Err(WireError::incompatible(MESSAGE, 8, SPEC, rule));
        }
        if usize::from(self.id) >= channels {
            let rule = format!(
                "channel {} of {channels}: use the same number of multifd channels on both sides",
                self.id
            );
            return Err(WireError::incompatible(MESSAGE, 24, SPEC, rule));
        }
        Ok(())
    }
}
