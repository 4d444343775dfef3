//! What names one migration, and what its two sides prove themselves with later (specs/extension.md §2).

use sterna_wire::extension::MigrationSecret;

use crate::error::MigrationError;

/// Drawn by the source for each migration.
pub(crate) struct Identity {
    /// Not a secret: it goes over the wire in clear with every question.
    pub id: [u8; 16],
    pub secret: MigrationSecret,
}

impl Identity {
    /// A new one, out of the operating system's generator.
    pub(crate) fn draw() -> Result<Self, MigrationError> {
        let mut bytes = [0; MigrationSecret::BYTES];
        fill(&mut bytes)?;
        Ok(Self { id: nonce()?, secret: MigrationSecret::from_bytes(bytes) })
    }
}

/// 16 bytes that never come again.
pub(crate) fn nonce() -> Result<[u8; 16], MigrationError> {
    let mut bytes = [0; 16];
    fill(&mut bytes)?;
    Ok(bytes)
}

fn fill(bytes: &mut [u8]) -> Result<(), MigrationError> {
    getrandom::fill(bytes).map_err(|error| {
        MigrationError::System(format!("the operating system provides no random bytes: {error}"))
    })
}
