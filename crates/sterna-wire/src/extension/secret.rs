//! The secret of one migration, and the MACs made with it (`specs/extension.md §2`).
//!
//! Connections that follow the first one (status question, reconnect, preempt, memory) prove with it that they
//! belong to the migration.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroize;

/// 32 bytes that the source draws for one migration and sends to the destination.
///
/// Both sides authenticate later connections with it. `Debug` does not print the bytes, and `Drop` wipes them.
#[derive(Clone)]
pub struct MigrationSecret([u8; Self::BYTES]);

/// A message authentication code (HMAC-SHA-256).
pub type MacBytes = [u8; MigrationSecret::MAC_BYTES];

impl MigrationSecret {
    /// Length of the secret, in bytes.
    pub const BYTES: usize = 32;
    /// Length of a MAC, in bytes.
    pub const MAC_BYTES: usize = 32;

    /// A secret from 32 bytes of the operating system's random generator, or from the peer.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Whether all bytes are zero, which means that there is no secret.
    pub fn is_none(&self) -> bool {
        self.0 == [0; Self::BYTES]
    }

    /// Authenticates `parts` for the purpose that `label` names.
    ///
    /// A MAC for one label is not valid for another. Each part is authenticated with its length, so bytes
    /// cannot move from one part to the next.
    pub fn mac(&self, label: &str, parts: &[&[u8]]) -> MacBytes {
        self.begin(label, parts).finalize().into_bytes().into()
    }

    /// Whether `mac` is the MAC of these parts. The comparison takes constant time.
    #[must_use]
    pub fn verify(&self, label: &str, parts: &[&[u8]], mac: &MacBytes) -> bool {
        self.begin(label, parts).verify_slice(mac).is_ok()
    }

    fn begin(&self, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC-SHA-256 accepts this key size, so there is no error to handle.
        let mut mac = Hmac::<Sha256>::new(&self.padded().into());
        for part in std::iter::once(&label.as_bytes()).chain(parts) {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }

    /// The key, padded with zeros to a whole block. HMAC pads a shorter key in the same way.
    fn padded(&self) -> [u8; 64] {
        let mut block = [0; 64];
        block[..Self::BYTES].copy_from_slice(&self.0);
        block
    }

    pub(super) fn to_wire(&self) -> [u8; Self::BYTES] {
        self.0
    }
}

impl fmt::Debug for MigrationSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MigrationSecret(..)")
    }
}

impl Drop for MigrationSecret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}
