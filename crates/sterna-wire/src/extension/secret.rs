//! The secret of one migration, and what is derived from it (`specs/extension.md §2`).

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroize;

/// 32 bytes that the source draws for one migration and gives to the destination. Both sides prove with it, over
/// other connections, that they are the ones that took part.
///
/// It never shows its bytes in a log, and wipes them when it is dropped.
#[derive(Clone)]
pub struct MigrationSecret([u8; Self::BYTES]);

/// What a message is authenticated with.
pub type MacBytes = [u8; MigrationSecret::MAC_BYTES];

impl MigrationSecret {
    /// Length of the secret.
    pub const BYTES: usize = 32;
    /// Length of a MAC.
    pub const MAC_BYTES: usize = 32;

    /// A secret of bytes that the operating system's generator has just given, or that came from the peer.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Whether it is none: all bytes are zero.
    pub fn is_none(&self) -> bool {
        self.0 == [0; Self::BYTES]
    }

    /// Authenticates `parts` for the purpose that `label` names. A MAC under one label is worth nothing under
    /// another, and the parts cannot be shifted against each other: lengths are part of what is authenticated.
    pub fn mac(&self, label: &str, parts: &[&[u8]]) -> MacBytes {
        self.begin(label, parts).finalize().into_bytes().into()
    }

    /// Whether `mac` is what [`MigrationSecret::mac`] gives. Takes the same time wherever the first difference is.
    #[must_use]
    pub fn verify(&self, label: &str, parts: &[&[u8]], mac: &MacBytes) -> bool {
        self.begin(label, parts).verify_slice(mac).is_ok()
    }

    fn begin(&self, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // The fixed size of the key fits HMAC-SHA-256, so there is no error to handle.
        let mut mac = Hmac::<Sha256>::new(&self.padded().into());
        for part in std::iter::once(&label.as_bytes()).chain(parts) {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }

    /// A key of a whole block: HMAC puts these zeros behind a shorter key itself.
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
