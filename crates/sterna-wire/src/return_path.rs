//! Messages of the return path, from the destination to the source (`specs/stream.md §1.9`).

use crate::error::WireError;
use crate::extension::ConfigurationRefusal;
use crate::limits::RETURN_MESSAGE_BYTES;
use crate::reader::{self, Reader, Stop};

const MESSAGE: &str = "return path message";
const SPEC: &str = "specs/stream.md §1.9";
/// The type of [`ReturnMessage::Grant`], which is not a type of QEMU.
const GRANT: u16 = 0x5301;
/// The type of [`ReturnMessage::ConfigurationRefused`], which is not a type of QEMU.
const CONFIGURATION_REFUSED: u16 = 0x5302;

/// One message of the return path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReturnMessage {
    /// The end of the migration. 0: everything is loaded; other values: failure (QEMU sends 1).
    ///
    /// It is the last message, except with COLO.
    Shut(u32),
    /// Answer to the PING with the same value.
    Pong(u32),
    /// Postcopy: the destination needs these pages now.
    RequestPages {
        /// Name of the RAM block; `None` for the block of the previous request.
        block: Option<String>,
        /// Offset of the first byte in the block.
        start: u64,
        /// Number of bytes from `start` on.
        length: u32,
    },
    /// Recovery: the pages of this block that have arrived. The bitmap follows the message (§6.6).
    ReceivedBitmap {
        /// Name of the RAM block.
        block: String,
    },
    /// Recovery: the destination is ready to continue. The value is 1.
    ResumeAck(u32),
    /// A device that delays the switchover is ready for it (§5.3).
    SwitchoverAck,
    /// Between two Sternas: the grant for a device stream (`specs/extension.md §8`).
    Grant {
        /// Section name of the device.
        device: String,
        /// Number that distinguishes devices with the same name.
        instance: u32,
        /// Payload bytes that the source may have sent since the migration began, in total.
        bytes: u64,
    },
    /// Between two Sternas: no VM was made from the source's configuration (`specs/extension.md §15`).
    ConfigurationRefused(ConfigurationRefusal),
}

impl ReturnMessage {
    /// Longest message, in bytes.
    pub const MAX_BYTES: usize = 4 + RETURN_MESSAGE_BYTES;

    /// Appends the bytes on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when a block name is not 1 to 255 bytes without NUL, or when a
    /// refusal has a name or a text of another form.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        match self {
            ReturnMessage::Shut(value) => put(out, 1, &[&value.to_be_bytes()]),
            ReturnMessage::Pong(value) => put(out, 2, &[&value.to_be_bytes()]),
            ReturnMessage::RequestPages { block: Some(block), start, length } => {
                let name = named(block)?;
                put(out, 3, &[&start.to_be_bytes(), &length.to_be_bytes(), &[name], block.as_bytes()]);
            }
            ReturnMessage::RequestPages { block: None, start, length } => {
                put(out, 4, &[&start.to_be_bytes(), &length.to_be_bytes()]);
            }
            ReturnMessage::ReceivedBitmap { block } => {
                let name = named(block)?;
                put(out, 5, &[&[name], block.as_bytes()]);
            }
            ReturnMessage::ResumeAck(value) => put(out, 6, &[&value.to_be_bytes()]),
            ReturnMessage::SwitchoverAck => put(out, 7, &[]),
            ReturnMessage::Grant { device, instance, bytes } => {
                let name = named(device)?;
                put(out, GRANT, &[&bytes.to_be_bytes(), &instance.to_be_bytes(), &[name], device.as_bytes()]);
            }
            ReturnMessage::ConfigurationRefused(refusal) => {
                refusal.check()?;
                let (kind, name, text) = refusal.parts();
                let length = [name.len() as u8];
                let length = &length[usize::from(name.is_empty())..];
                put(out, CONFIGURATION_REFUSED, &[&[kind], length, name.as_bytes(), text.as_bytes()]);
            }
        }
        Ok(())
    }

    /// Reads one message from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// An unknown type; a length that does not fit the type; a bad name; a RESUME_ACK other than 1.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let kind = r.u16()?;
            if !(1..=7).contains(&kind) && ![GRANT, CONFIGURATION_REFUSED].contains(&kind) {
                return Err(r.bad(SPEC, format!("type {kind} is not 1 to 7")));
            }
            let length = usize::from(r.u16()?);
            check_length(r, kind, length)?;
            let end = r.at() + length;
            let message = body(r, kind, length)?;
            if r.at() != end {
                return Err(r.bad(SPEC, format!("type {kind} does not fill its {length} bytes")));
            }
            Ok(message)
        })
    }
}

/// Compares a length with its type before the decoder waits for so many bytes.
fn check_length(r: &Reader<'_>, kind: u16, length: usize) -> Result<(), Stop> {
    let fits = match kind {
        1 | 2 | 6 => length == 4,
        3 | GRANT => (14..=13 + 255).contains(&length),
        4 => length == 12,
        5 => (2..=1 + 255).contains(&length),
        CONFIGURATION_REFUSED => ConfigurationRefusal::LENGTHS.contains(&length),
        _ => length == 0,
    };
    if fits { Ok(()) } else { Err(r.bad(SPEC, format!("type {kind} cannot have {length} bytes"))) }
}

fn body(r: &mut Reader<'_>, kind: u16, length: usize) -> Result<ReturnMessage, Stop> {
    Ok(match kind {
        1 => ReturnMessage::Shut(r.u32()?),
        2 => ReturnMessage::Pong(r.u32()?),
        3 => {
            let (start, length) = (r.u64()?, r.u32()?);
            ReturnMessage::RequestPages { block: Some(r.name()?.to_owned()), start, length }
        }
        4 => ReturnMessage::RequestPages { block: None, start: r.u64()?, length: r.u32()? },
        5 => ReturnMessage::ReceivedBitmap { block: r.name()?.to_owned() },
        6 => match r.u32()? {
            1 => ReturnMessage::ResumeAck(1),
            other => return Err(r.bad(SPEC, format!("RESUME_ACK is {other}, not 1"))),
        },
        GRANT => {
            let (bytes, instance) = (r.u64()?, r.u32()?);
            ReturnMessage::Grant { device: r.name()?.to_owned(), instance, bytes }
        }
        CONFIGURATION_REFUSED => ReturnMessage::ConfigurationRefused(ConfigurationRefusal::read(r, length)?),
        _ => ReturnMessage::SwitchoverAck,
    })
}

fn named(block: &str) -> Result<u8, WireError> {
    match u8::try_from(block.len()) {
        Ok(length) if length > 0 && !block.contains('\0') => Ok(length),
        _ => {
            let rule = format!("name {block:?} is not 1 to 255 bytes without NUL");
            Err(WireError::local(MESSAGE, 4, SPEC, rule))
        }
    }
}

fn put(out: &mut Vec<u8>, kind: u16, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&kind.to_be_bytes());
    // At most 512 bytes, so the length fits a u16.
    out.extend_from_slice(&(length as u16).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}
