//! The question that a source asks after the acknowledgement was lost (`specs/extension.md §6`).
//!
//! The answer decides whether the source may run the guest. Decoding a message proves nothing.
//! [`StatusQuestion::is_authentic`] and [`StatusAnswer::is_authentic`] check the MAC.

use super::secret::MacBytes;
use super::secret::MigrationSecret;
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §6";
const MAGIC: u32 = 0x5354_4e51;
const VERSION: u32 = 2;
const QUESTION_LABEL: &str = "sterna status question";
const ANSWER_LABEL: &str = "sterna status answer";

/// The value that TLS exports for a connection (RFC 9266); `None` without TLS.
///
/// A MAC that covers it is valid on that connection only.
pub type ChannelBinding = Option<[u8; 32]>;

/// Asks for the state of a migration. It is the first message of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusQuestion {
    /// The id from the handover section.
    pub migration_id: [u8; 16],
    /// Drawn at random for this question. The answer's MAC covers it, so that an old answer cannot be replayed.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl StatusQuestion {
    /// The first four bytes of the connection, "STNQ". No other kind of connection starts with them.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 72;

    /// A question about a migration, authenticated with `secret` and bound to `binding`.
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

    /// Whether a peer that knows the secret sent this question over the connection of `binding`.
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

    /// Reads one question from the start of `buf`; `None` while bytes are missing.
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

/// The state of the migration at the destination, and its consequence for the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// The destination runs the guest or did so: the source must not run it.
    Committed,
    /// The destination does not run the guest and never will: the source may run it.
    Never,
    /// The destination is still loading, or prepared: the source asks again later.
    Pending,
    /// The destination runs the guest or did so, but may lack pages (postcopy).
    ///
    /// The source must keep its pages.
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

/// The authenticated answer to one [`StatusQuestion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusAnswer {
    /// The state of the migration at the destination.
    pub status: Status,
    mac: MacBytes,
}

impl StatusAnswer {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 44;

    /// The answer to `question`, bound to the connection of `binding`.
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

    /// Whether a peer that knows the secret answered this question over the connection of `binding`.
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

    /// Reads one answer from the start of `buf`; `None` while bytes are missing.
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

/// The binding's bytes for the MAC. Empty without TLS, so a connection without TLS never has the MAC of one
/// with TLS.
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
