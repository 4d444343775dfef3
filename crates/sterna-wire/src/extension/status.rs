//! The question that a source asks when the acknowledgement was lost (`specs/extension.md §6`).

use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §6";
const MAGIC: u32 = 0x5354_4e51;
const VERSION: u32 = 1;

/// "What became of this migration?", asked first thing over a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusQuestion {
    /// The id that the handover section stated.
    pub migration_id: [u8; 16],
}

impl StatusQuestion {
    /// The first four bytes of the connection, "STNQ": nothing else that a destination accepts starts so.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Bytes on the wire.
    pub const BYTES: usize = 24;

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&self.migration_id);
    }

    /// Reads one from the start of `buf`.
    ///
    /// # Errors
    /// A wrong magic or version.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "status question", |r| {
            open(r)?;
            Ok(Self { migration_id: r.array()? })
        })
    }
}

/// Where the destination stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// It runs the guest or did so: the source must not.
    Committed,
    /// It does not run the guest and never will: the source may.
    Never,
    /// It is still loading, or prepared: ask again.
    Pending,
    /// It has never heard of this migration.
    Unknown,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusAnswer {
    /// Where the destination stands.
    pub status: Status,
}

impl StatusAnswer {
    /// Bytes on the wire.
    pub const BYTES: usize = 12;

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let status: u32 = match self.status {
            Status::Committed => 1,
            Status::Never => 2,
            Status::Pending => 3,
            Status::Unknown => 4,
        };
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&status.to_be_bytes());
    }

    /// Reads one from the start of `buf`.
    ///
    /// # Errors
    /// A wrong magic, version or status.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "status answer", |r| {
            open(r)?;
            let status = match r.u32()? {
                1 => Status::Committed,
                2 => Status::Never,
                3 => Status::Pending,
                4 => Status::Unknown,
                other => return Err(r.bad(SPEC, format!("status {other} is not 1 to 4"))),
            };
            Ok(Self { status })
        })
    }
}

fn open(r: &mut reader::Reader<'_>) -> Result<(), reader::Stop> {
    if r.u32()? != MAGIC {
        return Err(r.bad(SPEC, "the magic is not \"STNQ\""));
    }
    let version = r.u32()?;
    if version != VERSION {
        return Err(r.unfit(SPEC, format!("version {version}, only {VERSION} is known")));
    }
    Ok(())
}
