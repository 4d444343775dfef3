//! The first bytes of a preempt channel between two Sternas (`specs/extension.md §12`).
//!
//! A QEMU's preempt channel begins with a page, or says nothing for long, so that anybody could take its place. Between two
//! Sternas it says whose it is.

use super::MigrationSecret;
use super::secret::MacBytes;
use super::status::ChannelBinding;
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §12";
const MAGIC: u32 = 0x5354_4e50;
const VERSION: u32 = 1;
const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();
const LABEL: &str = "sterna preempt channel";

/// "I am the preempt channel of this migration." Decoding proves nothing; [`PreemptHello::is_authentic`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreemptHello {
    /// The id that the handover section stated.
    pub migration_id: [u8; 16],
    mac: MacBytes,
}

impl PreemptHello {
    /// The first four bytes of the connection, "STNP".
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Bytes on the wire.
    pub const BYTES: usize = 56;

    /// The hello of that migration, over the connection of that binding.
    pub fn new(migration_id: [u8; 16], secret: &MigrationSecret, binding: &ChannelBinding) -> Self {
        let binding = bound(binding);
        Self { migration_id, mac: secret.mac(LABEL, &[&VERSION_BYTES, &migration_id, &binding]) }
    }

    /// Whether somebody who knows the secret says it, over the connection of that binding.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(LABEL, &[&VERSION_BYTES, &self.migration_id, &bound(binding)], &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&Self::MAGIC);
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.migration_id);
        out.extend_from_slice(&self.mac);
    }

    /// Reads one from the start of `buf`.
    ///
    /// # Errors
    /// A wrong magic or version.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "preempt channel", |r| {
            if r.u32()? != MAGIC {
                return Err(r.bad(SPEC, "the magic is not \"STNP\""));
            }
            let version = r.u32()?;
            if version != VERSION {
                let rule =
                    format!("version {version}, only {VERSION} is known: run the same Sterna on both sides");
                return Err(r.unfit(SPEC, rule));
            }
            Ok(Self { migration_id: r.array()?, mac: r.array()? })
        })
    }
}

fn bound(binding: &ChannelBinding) -> Vec<u8> {
    binding.map(|value| value.to_vec()).unwrap_or_default()
}
