//! The name and the secret of one migration (`specs/extension.md §2`).
//!
//! The source sends both in the first section of the stream. With them, each side proves on later connections
//! that it took part.

use super::secret::MigrationSecret;
use crate::error::WireError;

const MESSAGE: &str = "handover section";
const SPEC: &str = "specs/extension.md §2";
const ID_BYTES: usize = 16;

/// Body of the FULL section that gives the migration its name and its secret.
#[derive(Debug, Clone)]
pub struct Handover {
    /// 16 bytes that the source draws at random.
    pub migration_id: [u8; ID_BYTES],
    /// The key with which both sides authenticate later connections. `None` from a source that sends version 1.
    pub secret: Option<MigrationSecret>,
}

impl Handover {
    /// Name of the section on the wire.
    pub const SECTION_NAME: &'static str = "sterna/handover";
    /// Instance of the section on the wire.
    pub const SECTION_INSTANCE: u32 = 0;
    /// The version that is sent. Version 1, without a secret, is accepted when read.
    pub const SECTION_VERSION: u32 = 2;
    /// Length of the longest body in bytes.
    pub const BODY_BYTES: usize = ID_BYTES + MigrationSecret::BYTES;

    /// The version and the body as they are on the wire.
    pub fn encode(&self) -> (u32, Vec<u8>) {
        let mut body = self.migration_id.to_vec();
        match &self.secret {
            Some(secret) => {
                body.extend_from_slice(&secret.to_wire());
                (Self::SECTION_VERSION, body)
            }
            None => (1, body),
        }
    }

    /// Reads the body of a section of `version`.
    ///
    /// # Errors
    /// An unknown version, a body whose length is not the version's, an id of zeros.
    pub fn decode(version: u32, body: &[u8]) -> Result<Self, WireError> {
        let secret_bytes = match version {
            1 => 0,
            Self::SECTION_VERSION => MigrationSecret::BYTES,
            _ => {
                let rule = format!("version {version}, only 1 and {} are known", Self::SECTION_VERSION);
                return Err(WireError::incompatible(MESSAGE, 0, SPEC, rule));
            }
        };
        let parts = body.split_first_chunk::<ID_BYTES>().filter(|(_, rest)| rest.len() == secret_bytes);
        let Some((migration_id, rest)) = parts else {
            let rule = format!(
                "{} bytes, but version {version} has {}: its length is wrong",
                body.len(),
                ID_BYTES + secret_bytes
            );
            return Err(WireError::misbehaved(MESSAGE, 0, SPEC, rule));
        };
        if *migration_id == [0; ID_BYTES] {
            return Err(WireError::misbehaved(MESSAGE, 0, SPEC, "the migration's id is all zero"));
        }
        let secret = rest.first_chunk().copied().map(MigrationSecret::from_bytes);
        Ok(Self { migration_id: *migration_id, secret })
    }
}
