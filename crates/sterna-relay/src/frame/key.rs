//! The names and keys of a session, with which the two relays prove that they belong to it.

use std::fmt;

use sterna_wire::extension::MigrationSecret;
use zeroize::Zeroize;

/// The 16 random bytes that name a session. They are a name, not a secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The first half is enough to find the session in a log.
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

/// The value that both ends of a TLS connection export (RFC 9266); `None` without TLS.
pub type Binding = Option<[u8; 32]>;

/// The 32 bytes of a secret file that both relays have.
#[derive(Clone)]
pub struct SharedSecret([u8; Self::BYTES]);

impl SharedSecret {
    /// Length of a secret, in bytes.
    pub const BYTES: usize = 32;

    /// Reads the content of a secret file: 32 bytes, or 64 hexadecimal digits and at most one line end.
    ///
    /// `None` for any other content, and for 32 zero bytes.
    pub fn from_file(content: &[u8]) -> Option<Self> {
        let digits = content.strip_suffix(b"\n").unwrap_or(content);
        let digits = digits.strip_suffix(b"\r").unwrap_or(digits);
        let mut bytes = [0; Self::BYTES];
        if content.len() == Self::BYTES {
            bytes.copy_from_slice(content);
        } else if digits.len() == 2 * Self::BYTES {
            for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
                let digit = |at: usize| char::from(pair[at]).to_digit(16);
                *byte = (digit(0)? * 16 + digit(1)?) as u8;
            }
        } else {
            return None;
        }
        (bytes != [0; Self::BYTES]).then_some(Self(bytes))
    }
}

impl fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedSecret(..)")
    }
}

impl Drop for SharedSecret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The key of one session.
///
/// It is made of the shared secret (zeros without one), the session's id and the share that the hello carried. A
/// relay without the secret cannot make it; a relay without the first hello cannot either.
#[derive(Clone, Debug)]
pub struct SessionKey(MigrationSecret);

impl SessionKey {
    /// Length of the share, in bytes.
    pub const SHARE_BYTES: usize = 32;

    /// The key of the session `id`, whose hello carries `share`.
    pub fn new(secret: Option<&SharedSecret>, id: SessionId, share: &[u8; Self::SHARE_BYTES]) -> Self {
        let base = MigrationSecret::from_bytes(secret.map_or([0; 32], |secret| secret.0));
        Self(MigrationSecret::from_bytes(base.mac("sterna relay session", &[&id.0, share])))
    }

    pub(super) fn mac(&self, label: &str, parts: &[&[u8]], binding: &Binding) -> [u8; 32] {
        self.0.mac(label, &[parts, &[bound(binding)]].concat())
    }

    pub(super) fn verify(&self, label: &str, parts: &[&[u8]], binding: &Binding, mac: &[u8; 32]) -> bool {
        self.0.verify(label, &[parts, &[bound(binding)]].concat(), mac)
    }
}

fn bound(binding: &Binding) -> &[u8] {
    binding.as_ref().map_or(&[], |bytes| &bytes[..])
}
