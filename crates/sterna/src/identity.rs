//! Identity of one migration: its public id, and the secret with which its sides authenticate later
//! (specs/extension.md §2).

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sterna_wire::extension::MigrationSecret;

use crate::error::MigrationError;

/// Drawn by the source for each migration.
pub(crate) struct Identity {
    /// Public: every question carries it in clear over the wire.
    pub id: [u8; 16],
    pub secret: MigrationSecret,
}

impl Identity {
    /// Draws a new identity from the operating system's random generator.
    pub(crate) fn draw() -> Result<Self, MigrationError> {
        let mut bytes = [0; MigrationSecret::BYTES];
        fill(&mut bytes)?;
        Ok(Self { id: nonce()?, secret: MigrationSecret::from_bytes(bytes) })
    }
}

/// 16 random bytes that are used once.
pub fn nonce() -> Result<[u8; 16], MigrationError> {
    let mut bytes = [0; 16];
    fill(&mut bytes)?;
    Ok(bytes)
}

fn fill(bytes: &mut [u8]) -> Result<(), MigrationError> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => {
                let text = format!("the operating system provides no random bytes: {error}");
                return Err(MigrationError::System(text, None));
            }
        }
    }
    Ok(())
}
