//! Device state over multifd channels (`specs/stream.md §3.8`).

use super::layout::FLAG_DEVICE_STATE;
use super::layout::{MAGIC, VERSION};
use super::packet::{PacketHeader, PacketKind};
use crate::error::WireError;
use crate::limits;
use crate::reader;

const MESSAGE: &str = "multifd device-state packet";
const SPEC: &str = "specs/stream.md §3.8";

/// The packet before a piece of a device's state. The piece follows as payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatePacket {
    /// Section name of the device, 1 to 255 bytes.
    pub name: String,
    /// Number that distinguishes devices with the same name.
    pub instance: u32,
    /// Length of the payload, in bytes. At least 1.
    pub payload_bytes: u32,
}

impl DeviceStatePacket {
    /// Appends the packet, without the payload.
    ///
    /// # Errors
    /// A name or length that the receiver would refuse.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() > limits::NAME_BYTES || name.contains(&0) {
            let rule = format!("section name {:?} is not 1 to 255 bytes without NUL", self.name);
            return Err(WireError::local(MESSAGE, 12, SPEC, rule));
        }
        if self.payload_bytes == 0 || self.payload_bytes > limits::DEVICE_STATE_PACKET_BYTES {
            let rule = format!(
                "a payload of {} bytes, not 1 to {}",
                self.payload_bytes,
                limits::DEVICE_STATE_PACKET_BYTES
            );
            return Err(WireError::local(MESSAGE, 272, SPEC, rule));
        }
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&FLAG_DEVICE_STATE.to_be_bytes());
        out.extend_from_slice(name);
        out.resize(out.len() + 256 - name.len(), 0);
        out.extend_from_slice(&self.instance.to_be_bytes());
        out.extend_from_slice(&self.payload_bytes.to_be_bytes());
        Ok(())
    }

    /// Reads one packet from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong header; an empty name, or one without NUL; a payload length of 0 or above the limit.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some(PacketHeader { kind }) = PacketHeader::peek(buf)? else { return Ok(None) };
        if kind != PacketKind::DeviceState {
            return Err(WireError::misbehaved(MESSAGE, 8, SPEC, "a RAM packet instead of device state"));
        }
        reader::decode(buf, MESSAGE, |r| {
            r.take(super::layout::HEADER_BYTES)?;
            let field = r.take(256)?;
            let name = match field.iter().position(|byte| *byte == 0) {
                None => return Err(r.bad(SPEC, "the section name does not end in NUL")),
                Some(0) => return Err(r.bad(SPEC, "the section name is empty")),
                Some(end) => r.text(&field[..end])?.to_owned(),
            };
            let instance = r.u32()?;
            let payload_bytes = r.u32()?;
            if payload_bytes == 0 {
                return Err(r.bad(SPEC, "the payload is empty"));
            }
            if payload_bytes > limits::DEVICE_STATE_PACKET_BYTES {
                let rule = format!(
                    "{payload_bytes} bytes of payload, more than {}",
                    limits::DEVICE_STATE_PACKET_BYTES
                );
                return Err(r.bad(SPEC, rule));
            }
            Ok(Self { name, instance, payload_bytes })
        })
    }
}
