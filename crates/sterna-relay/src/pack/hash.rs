//! The name of a page.

use sha2::{Digest, Sha256};

/// SHA-256 of a page. Two pages with the same hash have the same content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; 32]);

impl PageHash {
    /// The hash of these bytes.
    pub fn of(page: &[u8]) -> Self {
        Self(Sha256::digest(page).into())
    }

    /// The first 8 bytes, by which pages are announced and found.
    pub fn prefix(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}
