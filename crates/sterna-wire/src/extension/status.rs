//! The question that a source asks when the acknowledgement was lost (`specs/extension.md §6`).
//!
//! Decoding a message proves nothing. [`StatusQuestion::is_authentic`] and [`StatusAnswer::is_authentic`] do.

use super::MigrationSecret;
use super::secret::MacBytes;
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §6";
const MAGIC: u32 = 0x5354_4e51;
const VERSION: u32 = 2;
const QUESTION_LABEL: &str = "sterna status question";
const ANSWER_LABEL: &str = "sterna status answer";

/// Of which connection a message is part: the value that TLS exports for it (RFC 9266), `None` without TLS.
pub type ChannelBinding = Option<[u8; 32]>;

/// "What became of this migration?", asked first thing over a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusQuestion {
    /// The id that the handover section stated.
    pub migration_id: [u8; 16],
    /// Drawn at random for this question: the answer is bound to it.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl StatusQuestion {
    /// The first four bytes of the connection, "STNQ": nothing else that a destination accepts starts so.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Bytes on the wire.
    pub const BYTES: usize = 72;

    /// A question about the migration of that name and secret, over the connection of that binding.
    pub fn new(
        migration_id: [u8; 16],
        nonce: [u8; 16],
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> Self {
        let unsigned = Self { migration_id, nonce, mac: [0; 32] };
        let mac = secret.mac(QUESTION_LABEL, &unsigned.parts(&bound(binding)));
        Self { mac, ..unsigned }
    }

    /// Whether somebody who knows the secret asks it, over the connection of that binding.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(QUESTION_LABEL, &self.parts(&bound(binding)), &self.mac)
    }

    fn parts<'a>(&'a self, binding: &'a [u8]) -> [&'a [u8]; 4] {
        [&VERSION_BYTES, &self.migration_id, &self.nonce, binding]
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.migration_id);
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.mac);
    }

    /// Reads one from the start of `buf`.
    ///
    /// # Errors
    /// A wrong magic or version.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "status question", |r| {
            open(r)?;
            Ok(Self { migration_id: r.array()?, nonce: r.array()?, mac: r.array()? })
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
    /// It runs the guest or did so, and may lack pages that only the source has (postcopy): the source must keep them.
    Incomplete,
}

impl Status {
    fn code(self) -> u32 {
        match self {
            Self::Committed => 1,
            Self::Never => 2,
            Self::Pending => 3,
            Self::Incomplete => 4,
        }
    }
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusAnswer {
    /// Where the destination stands.
    pub status: Status,
    mac: MacBytes,
}

impl StatusAnswer {
    /// Bytes on the wire.
    pub const BYTES: usize = 44;

    /// The answer to `question`, which came over the connection of that binding.
    pub fn new(
        status: Status,
        question: &StatusQuestion,
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> Self {
        let code = status.code().to_be_bytes();
        let mac = secret.mac(ANSWER_LABEL, &Self::parts(&code, question, &bound(binding)));
        Self { status, mac }
    }

    /// Whether somebody who knows the secret answers just this question, over the connection of that binding.
    #[must_use]
    pub fn is_authentic(
        &self,
        question: &StatusQuestion,
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> bool {
        let code = self.status.code().to_be_bytes();
        secret.verify(ANSWER_LABEL, &Self::parts(&code, question, &bound(binding)), &self.mac)
    }

    fn parts<'a>(code: &'a [u8; 4], question: &'a StatusQuestion, binding: &'a [u8]) -> [&'a [u8]; 5] {
        let [version, id, nonce, binding] = question.parts(binding);
        [version, id, nonce, code, binding]
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.status.code().to_be_bytes());
        out.extend_from_slice(&self.mac);
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
                4 => Status::Incomplete,
                other => return Err(r.bad(SPEC, format!("status {other} is not 1 to 4"))),
            };
            Ok(Self { status, mac: r.array()? })
        })
    }
}

const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();

/// A connection without TLS cannot pass for one with it, whatever TLS exports.
fn bound(binding: &ChannelBinding) -> Vec<u8> {
    binding.map(|value| value.to_vec()).unwrap_or_default()
}

fn open(r: &mut reader::Reader<'_>) -> Result<(), reader::Stop> {
    if r.u32()? != MAGIC {
        return Err(r.bad(SPEC, "the magic is not \"STNQ\""));
    }
    let version = r.u32()?;
    if version != VERSION {
        let rule = format!("version {version}, only {VERSION} is known: run the same Sterna on both sides");
        return Err(r.unfit(SPEC, rule));
    }
    Ok(())
}
