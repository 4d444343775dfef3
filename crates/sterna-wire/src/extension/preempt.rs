//! The first bytes of a preempt channel between two Sternas (`specs/extension.md §12`).
//!
//! A preempt channel of QEMU begins with a page, and may be silent for a long time before it. Any other client
//! could therefore take its place. Between two Sternas the channel identifies its migration first.

use super::secret::MacBytes;
use super::secret::MigrationSecret;
use super::status::ChannelBinding;
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §12";
const MAGIC: u32 = 0x5354_4e50;
const VERSION: u32 = 1;
const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();
const LABEL: &str = "sterna preempt channel";

/// Identifies a connection as the preempt channel of a migration.
///
/// Decoding proves nothing. [`PreemptHello::is_authentic`] checks the MAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreemptHello {
    /// The id from the handover section.
    pub migration_id: [u8; 16],
    mac: MacBytes,
}

impl PreemptHello {
    /// The first four bytes of the connection, "STNP".
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 56;

    /// The hello of a migration, authenticated with `secret` and bound to `binding`.
    pub fn new(migration_id: [u8; 16], secret: &MigrationSecret, binding: &ChannelBinding) -> Self {
        let binding = bound(binding);
        Self { migration_id, mac: secret.mac(LABEL, &[&VERSION_BYTES, &migration_id, &binding]) }
    }

    /// Whether a peer that knows the secret sent this hello over the connection of `binding`.
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

    /// Reads one hello from the start of `buf`; `None` while bytes are missing.
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
