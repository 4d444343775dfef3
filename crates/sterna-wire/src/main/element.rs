//! Section headers, footers and the end of the stream (`specs/stream.md §1.3`, `§1.4`).

use crate::error::WireError;
use crate::limits::NAME_BYTES;
use crate::reader::{Reader, Stop};

const SPEC: &str = "specs/stream.md §1.4";

pub(super) const EOF: u8 = 0x00;
pub(super) const START: u8 = 0x01;
pub(super) const PART: u8 = 0x02;
pub(super) const END: u8 = 0x03;
pub(super) const FULL: u8 = 0x04;
pub(super) const VM_DESCRIPTION: u8 = 0x06;
pub(super) const COMMAND: u8 = 0x08;
pub(super) const FOOTER: u8 = 0x7e;
/// Length of a footer, in bytes.
pub(super) const FOOTER_BYTES: usize = 5;

/// The kind of a section: its place among the sections of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// First section of a device that sends its state in several sections.
    Start,
    /// A further section of such a device.
    Part,
    /// The last section of such a device.
    End,
    /// The only section of a device: its whole state.
    Full,
}

impl SectionKind {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            START => Some(SectionKind::Start),
            PART => Some(SectionKind::Part),
            END => Some(SectionKind::End),
            FULL => Some(SectionKind::Full),
            _ => None,
        }
    }
}

/// Header of a START or FULL section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionHeader<'a> {
    /// Number that links the sections of one device within the stream.
    pub id: u32,
    /// Name of the device, 1 to 255 bytes without NUL.
    pub name: &'a str,
    /// Number that distinguishes devices with the same name.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
}

impl<'a> SectionHeader<'a> {
    /// Appends the header of a START section; body and footer follow.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when the name is not 1 to 255 bytes without NUL.
    pub fn encode_start(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.encode(START, out)
    }

    /// Appends the header of a FULL section; body and footer follow.
    ///
    /// # Errors
    /// As [`encode_start`](Self::encode_start).
    pub fn encode_full(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        self.encode(FULL, out)
    }

    fn encode(&self, kind: u8, out: &mut Vec<u8>) -> Result<(), WireError> {
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() > NAME_BYTES || name.contains(&0) {
            let rule = format!("section name {:?} is not 1 to 255 bytes without NUL", self.name);
            return Err(WireError::local("section header", 5, SPEC, rule));
        }
        out.push(kind);
        out.extend_from_slice(&self.id.to_be_bytes());
        out.push(name.len() as u8);
        out.extend_from_slice(name);
        out.extend_from_slice(&self.instance.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        Ok(())
    }

    /// Reads the part after the type byte.
    pub(super) fn read(r: &mut Reader<'a>) -> Result<Self, Stop> {
        Ok(Self { id: r.u32()?, name: r.name()?, instance: r.u32()?, version: r.u32()? })
    }
}

/// Appends the header of a PART section, or of an END section if `last`.
///
/// Body and footer follow.
pub fn encode_section_part(id: u32, last: bool, out: &mut Vec<u8>) {
    out.push(if last { END } else { PART });
    out.extend_from_slice(&id.to_be_bytes());
}

/// Appends the footer of the section `id`.
pub fn encode_footer(id: u32, out: &mut Vec<u8>) {
    out.push(FOOTER);
    out.extend_from_slice(&id.to_be_bytes());
}

/// Appends a body with its length in front ([`BodyKind::LengthPrefixed`](super::BodyKind::LengthPrefixed)).
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when the body has 4 GiB or more.
pub fn encode_length_prefixed(body: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
    let Ok(length) = u32::try_from(body.len()) else {
        let rule = format!("a body of {} bytes does not fit a u32", body.len());
        return Err(WireError::local("section body", 0, "specs/extension.md §7", rule));
    };
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(body);
    Ok(())
}

/// Appends EOF, the byte that commits. The output of [`vmdesc::encode`](crate::vmdesc::encode) follows.
pub fn encode_end(out: &mut Vec<u8>) {
    out.push(EOF);
}
