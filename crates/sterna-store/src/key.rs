//! Keys: hashing, encryption, and how both are derived from one secret (`specs/image.md §8`).

use std::fmt;
use std::path::Path;

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305};
use zeroize::{Zeroize, Zeroizing};

use crate::digest::{Digest, unhex};
use crate::error::StoreError;

/// Bytes that encryption adds: the nonce before the text, the tag after it.
pub(crate) const SEAL_BYTES: usize = NONCE_BYTES + 16;
const NONCE_BYTES: usize = 24;

/// The secret of encrypted images. Images with the same key can share frames.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Zeroizing<[u8; 32]>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

impl Key {
    /// Takes a secret of 32 random bytes.
    pub fn new(secret: [u8; 32]) -> Self {
        Self(Zeroizing::new(secret))
    }

    /// Reads a key from a file: 32 bytes, or 64 hexadecimal digits and white space.
    ///
    /// # Errors
    /// [`StoreError::BadKey`], [`StoreError::Missing`], [`StoreError::Io`].
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        let mut bytes = std::fs::read(path).map_err(|error| StoreError::io(&name, "read", error))?;
        let key = match <[u8; 32]>::try_from(bytes.as_slice()) {
            Ok(secret) => Some(secret),
            Err(_) => unhex(bytes.trim_ascii()),
        };
        bytes.zeroize();
        key.map(Self::new).ok_or(StoreError::BadKey { name })
    }

    fn derived(&self, purpose: &str) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(blake3::derive_key(purpose, &*self.0))
    }
}

/// Hashes and encrypts for one key, or hashes only.
#[derive(Clone)]
pub(crate) struct Crypt {
    keys: Option<Keys>,
}

#[derive(Clone)]
struct Keys {
    digest: Zeroizing<[u8; 32]>,
    nonce: Zeroizing<[u8; 32]>,
    check: Zeroizing<[u8; 32]>,
    cipher: XChaCha20Poly1305,
}

impl Crypt {
    pub(crate) fn new(key: Option<&Key>) -> Self {
        let keys = key.map(|key| Keys {
            digest: key.derived("sterna image v1 2026 digest"),
            nonce: key.derived("sterna image v1 2026 nonce"),
            check: key.derived("sterna image v1 2026 check"),
            cipher: XChaCha20Poly1305::new((&*key.derived("sterna image v1 2026 cipher")).into()),
        });
        Self { keys }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.keys.is_some()
    }

    /// Digest of the concatenated `parts`.
    pub(crate) fn digest(&self, parts: &[&[u8]]) -> Digest {
        let mut hasher = match &self.keys {
            Some(keys) => blake3::Hasher::new_keyed(&keys.digest),
            None => blake3::Hasher::new(),
        };
        for part in parts {
            hasher.update(part);
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// The header's proof of the key for `salt`; zeros without a key.
    pub(crate) fn check(&self, salt: &[u8; 32]) -> [u8; 16] {
        let mut check = [0; 16];
        if let Some(keys) = &self.keys {
            check.copy_from_slice(&blake3::keyed_hash(&keys.check, salt).as_bytes()[..16]);
        }
        check
    }

    /// Encrypts `text`, bound to `context`; returns it unchanged without a key.
    ///
    /// The nonce is a keyed hash of the text and its context. Therefore two different texts never have the same nonce, also
    /// if they are encrypted by different processes, and equal frames stay equal.
    pub(crate) fn seal(&self, text: Vec<u8>, context: &[u8]) -> Vec<u8> {
        let Some(keys) = &self.keys else { return text };
        let mut hasher = blake3::Hasher::new_keyed(&keys.nonce);
        hasher.update(&(context.len() as u64).to_le_bytes());
        hasher.update(context);
        hasher.update(&text);
        let hash = hasher.finalize();
        let nonce = &hash.as_bytes()[..NONCE_BYTES];
        let payload = Payload { msg: &text, aad: context };
        // The cipher fails only for texts above 256 GiB, and frames and indexes are far shorter.
        let sealed = keys.cipher.encrypt(nonce.into(), payload).unwrap_or_default();
        [nonce, &sealed].concat()
    }

    /// Decrypts `sealed`; none if it is not what [`seal`](Self::seal) made for this key and context.
    pub(crate) fn unseal(&self, sealed: Vec<u8>, context: &[u8]) -> Option<Vec<u8>> {
        let Some(keys) = &self.keys else { return Some(sealed) };
        let (nonce, text) = sealed.split_at_checked(NONCE_BYTES)?;
        keys.cipher.decrypt(nonce.into(), Payload { msg: text, aad: context }).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_text_opens_with_the_same_key_and_context_only() {
        let crypt = Crypt::new(Some(&Key::new([1; 32])));
        let sealed = crypt.seal(b"pages".to_vec(), b"frame");

        assert_eq!(sealed.len(), 5 + SEAL_BYTES);
        assert_eq!(crypt.unseal(sealed.clone(), b"frame").as_deref(), Some(&b"pages"[..]));
        assert_eq!(crypt.unseal(sealed.clone(), b"index"), None);
        assert_eq!(Crypt::new(Some(&Key::new([2; 32]))).unseal(sealed.clone(), b"frame"), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(crypt.unseal(changed, b"frame"), None, "byte {at}");
        }
    }

    #[test]
    fn two_texts_have_two_nonces_and_digests_depend_on_the_key() {
        let crypt = Crypt::new(Some(&Key::new([1; 32])));
        let nonce = |text: &[u8]| crypt.seal(text.to_vec(), b"")[..NONCE_BYTES].to_vec();

        assert_ne!(nonce(b"a"), nonce(b"b"));
        assert_eq!(nonce(b"a"), nonce(b"a"));
        assert_ne!(crypt.digest(&[b"a"]), Crypt::new(None).digest(&[b"a"]));
        assert_ne!(crypt.digest(&[b"a"]), Crypt::new(Some(&Key::new([2; 32]))).digest(&[b"a"]));
    }
}
