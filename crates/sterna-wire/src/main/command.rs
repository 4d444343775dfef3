//! Commands of the source on the main channel (`specs/stream.md §1.8`).

use super::element::COMMAND;
use crate::error::WireError;
use crate::limits;
use crate::reader::{self, Reader, Stop};

const SPEC: &str = "specs/stream.md §1.8";

/// A command that the source sends to the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The destination may send messages on the return path from now on.
    OpenReturnPath,
    /// Asks for a PONG with the same value.
    Ping(u32),
    /// Postcopy may follow. The values are the OR of all blocks' host page sizes, and the target page size.
    ///
    /// `None` if only `dirty-bitmaps` is on.
    PostcopyAdvise(Option<(u64, u64)>),
    /// Postcopy: the destination gets ready to receive and to request pages.
    PostcopyListen,
    /// Postcopy: the destination starts the guest.
    PostcopyRun,
    /// Postcopy: the destination drops these pages (§6.2).
    PostcopyDiscard {
        /// Name of the RAM block.
        block: String,
        /// Pairs of start and length in bytes, page-aligned, with a length above 0.
        ranges: Vec<(u64, u64)>,
    },
    /// So many bytes of embedded elements follow the command.
    Packaged(u32),
    /// Recovery: both sides agree on the missing pages, and the stream continues.
    PostcopyResume,
    /// Recovery: asks which pages of this block have arrived.
    ReceivedBitmap(String),
    /// The guest is paused, and the last pages and the device state follow.
    SwitchoverStart,
}

impl Command {
    /// Appends the bytes on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when a block name is not 1 to 255 bytes without NUL, or when there
    /// are 0 or more than 12 ranges.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let payload = self.payload()?;
        out.push(COMMAND);
        out.extend_from_slice(&self.number().to_be_bytes());
        // At most 3 + 255 + 12 × 16 bytes, so the length fits a u16.
        out.extend_from_slice(&(payload.len() as u16).to_be_bytes());
        out.extend_from_slice(&payload);
        Ok(())
    }

    /// Reads one command, type byte included, from `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// Another element, an unknown command, a wrong length.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "command", |r| {
            let kind = r.u8()?;
            if kind != COMMAND {
                return Err(r.bad(SPEC, format!("{kind:02x} instead of a command (08)")));
            }
            Self::read(r)
        })
    }

    fn number(&self) -> u16 {
        match self {
            Command::OpenReturnPath => 1,
            Command::Ping(_) => 2,
            Command::PostcopyAdvise(_) => 3,
            Command::PostcopyListen => 4,
            Command::PostcopyRun => 5,
            Command::PostcopyDiscard { .. } => 6,
            Command::Packaged(_) => 7,
            Command::PostcopyResume => 9,
            Command::ReceivedBitmap(_) => 10,
            Command::SwitchoverStart => 11,
        }
    }

    fn payload(&self) -> Result<Vec<u8>, WireError> {
        Ok(match self {
            Command::Ping(value) | Command::Packaged(value) => value.to_be_bytes().to_vec(),
            Command::PostcopyAdvise(Some((host, target))) => {
                [host.to_be_bytes(), target.to_be_bytes()].concat()
            }
            Command::PostcopyDiscard { block, ranges } => {
                if ranges.is_empty() || ranges.len() > DISCARD_RANGES {
                    let rule = format!("{} ranges, not 1 to {DISCARD_RANGES}", ranges.len());
                    return Err(WireError::local("command", 5, "specs/stream.md §6.2", rule));
                }
                let mut payload = vec![0];
                put_name(block, &mut payload)?;
                payload.push(0);
                for (start, length) in ranges {
                    payload.extend_from_slice(&start.to_be_bytes());
                    payload.extend_from_slice(&length.to_be_bytes());
                }
                payload
            }
            Command::ReceivedBitmap(block) => {
                let mut payload = Vec::new();
                put_name(block, &mut payload)?;
                payload
            }
            _ => Vec::new(),
        })
    }

    /// Reads the part after the type byte.
    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Stop> {
        let number = r.u16()?;
        if !is_known(number) {
            return Err(r.bad(SPEC, format!("command {number} is not 1 to 11 without 8")));
        }
        let length = usize::from(r.u16()?);
        if !length_fits(number, length) {
            return Err(r.bad(SPEC, format!("command {number} cannot have {length} bytes")));
        }
        let end = r.at() + length;
        // The whole payload must have arrived before any field is checked.
        r.clone().take(length)?;
        let command = Self::read_payload(r, number, length)?;
        if r.at() != end {
            return Err(r.bad(SPEC, format!("command {number} does not fill its {length} bytes")));
        }
        Ok(command)
    }

    fn read_payload(r: &mut Reader<'_>, number: u16, length: usize) -> Result<Self, Stop> {
        Ok(match number {
            1 => Command::OpenReturnPath,
            2 => Command::Ping(r.u32()?),
            3 if length == 0 => Command::PostcopyAdvise(None),
            3 => Command::PostcopyAdvise(Some((r.u64()?, r.u64()?))),
            4 => Command::PostcopyListen,
            5 => Command::PostcopyRun,
            6 => read_discard(r, length)?,
            7 => {
                let bytes = r.u32()?;
                if bytes > limits::PACKAGE_BYTES {
                    return Err(r.bad("specs/stream.md §9", format!("a package of {bytes} bytes")));
                }
                Command::Packaged(bytes)
            }
            9 => Command::PostcopyResume,
            10 => Command::ReceivedBitmap(read_name(r, length - 1)?),
            _ => Command::SwitchoverStart,
        })
    }
}

const DISCARD_RANGES: usize = 12;

/// Whether `after_type`, the bytes after a type byte 08, can begin a command.
///
/// `None` if more bytes are needed. Used to distinguish a footer from data that looks like one.
pub(super) fn plausible(after_type: &[u8]) -> Option<bool> {
    let (head, _) = after_type.split_first_chunk::<4>()?;
    let number = u16::from_be_bytes([head[0], head[1]]);
    let length = usize::from(u16::from_be_bytes([head[2], head[3]]));
    Some(is_known(number) && length_fits(number, length))
}

fn is_known(number: u16) -> bool {
    (1..=11).contains(&number) && number != 8
}

fn length_fits(number: u16, length: usize) -> bool {
    match number {
        2 | 7 => length == 4,
        3 => length == 0 || length == 16,
        6 => (20..=3 + 255 + 16 * DISCARD_RANGES).contains(&length),
        10 => (2..=256).contains(&length),
        _ => length == 0,
    }
}

fn read_discard(r: &mut Reader<'_>, length: usize) -> Result<Command, Stop> {
    let spec = "specs/stream.md §6.2";
    let version = r.u8()?;
    if version != 0 {
        return Err(r.unfit(spec, format!("version {version} of the discard list; only 0 is known")));
    }
    // The name must leave room for the final zero and at least one range.
    let block = read_name(r, length - 2 - 1 - 16)?;
    if r.u8()? != 0 {
        return Err(r.bad(spec, "the byte after the block name is not zero"));
    }
    let bytes = length - 3 - block.len();
    if !bytes.is_multiple_of(16) {
        return Err(r.bad(spec, format!("{bytes} bytes are not a whole number of ranges")));
    }
    let mut ranges = Vec::with_capacity(bytes / 16);
    for _ in 0..bytes / 16 {
        let (start, length) = (r.u64()?, r.u64()?);
        if length == 0
            || (start | length) % crate::PAGE_SIZE as u64 != 0
            || start.checked_add(length).is_none()
        {
            return Err(r.bad(spec, format!("a range of {length:#x} bytes at {start:#x}")));
        }
        ranges.push((start, length));
    }
    if ranges.len() > DISCARD_RANGES {
        return Err(r.bad(spec, format!("{} ranges, more than {DISCARD_RANGES}", ranges.len())));
    }
    Ok(Command::PostcopyDiscard { block, ranges })
}

/// Reads a name of at most `most` bytes, so that it stays inside the payload.
fn read_name(r: &mut Reader<'_>, most: usize) -> Result<String, Stop> {
    let length = r.clone().u8()?;
    if usize::from(length) > most {
        return Err(r.bad(SPEC, format!("a block name of {length} bytes does not fit the command")));
    }
    Ok(r.name()?.to_owned())
}

fn put_name(name: &str, out: &mut Vec<u8>) -> Result<(), WireError> {
    match u8::try_from(name.len()) {
        Ok(length) if length > 0 && !name.contains('\0') => out.push(length),
        _ => {
            let rule = format!("block name {name:?} is not 1 to 255 bytes without NUL");
            return Err(WireError::local("command", 5, SPEC, rule));
        }
    }
    out.extend_from_slice(name.as_bytes());
    Ok(())
}
