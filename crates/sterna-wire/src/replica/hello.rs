//! The greeting between primary and standby (`specs/replica.md §1`).
//!
//! It authenticates both sides by their common secret, and sets the times of the protection. Decoding proves
//! nothing. [`Hello::is_authentic`] and [`Welcome::is_authentic`] check the MAC.

use super::opening::{MAGIC, SPEC, VERSION_BYTES, bound, open};
use crate::error::WireError;
use crate::extension::{ChannelBinding, MacBytes, MigrationSecret};
use crate::reader;

const HELLO_LABEL: &str = "sterna replica hello";
const WELCOME_LABEL: &str = "sterna replica welcome";
const NEEDS_FENCE: u32 = 1;
const SENDS_DIFFERENCES: u32 = 2;

/// The times of a protection, in microseconds, and the drift of the clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Time between two heartbeats, in microseconds.
    pub heartbeat_us: u32,
    /// The lease in microseconds: how long an echoed heartbeat lets the primary run the guest.
    pub lease_us: u32,
    /// Most time that the primary needs to stop the guest after the lease, in microseconds.
    pub margin_us: u32,
    /// Time between a claim that reached no arbiter and the next one, in microseconds.
    pub claim_interval_us: u32,
    /// Largest difference between the rates of the two clocks, in thousandths.
    pub drift_per_mille: u32,
}

/// The primary's first message: identity and terms of the protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Drawn at random for this protection.
    pub protection_id: [u8; 16],
    /// The generation that the arbiter's claim refers to. At least 1.
    pub generation: u64,
    /// Whether the primary cannot stop its guest itself, so that the standby needs a fence.
    pub needs_fence: bool,
    /// Whether pages are sent as differences over multifd channels (`specs/extension.md §10`).
    pub sends_differences: bool,
    /// The times of the protection.
    pub terms: Terms,
    /// Drawn at random for this connection.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl Hello {
    /// The first four bytes of the connection, "STNR". No other kind of connection starts with them.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 104;

    /// A hello, authenticated with `secret` and bound to the connection of `binding`.
    pub fn new(
        protection_id: [u8; 16],
        generation: u64,
        needs_fence: bool,
        terms: Terms,
        nonce: [u8; 16],
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> Self {
        let sends_differences = false;
        let unsigned =
            Self { protection_id, generation, needs_fence, sends_differences, terms, nonce, mac: [0; 32] };
        unsigned.sign(secret, binding)
    }

    /// The same hello, with the announcement of differences over multifd channels.
    #[must_use]
    pub fn announcing_differences(self, secret: &MigrationSecret, binding: &ChannelBinding) -> Self {
        Self { sends_differences: true, ..self }.sign(secret, binding)
    }

    fn sign(self, secret: &MigrationSecret, binding: &ChannelBinding) -> Self {
        let mac = secret.mac(HELLO_LABEL, &[&self.signed(), &bound(binding)]);
        Self { mac, ..self }
    }

    /// Whether a peer that knows the secret sent this hello over the connection of `binding`.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(HELLO_LABEL, &[&self.signed(), &bound(binding)], &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.signed());
        out.extend_from_slice(&self.mac);
    }

    /// Reads one hello from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic, version or generation; an unknown flag.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "replica hello", |r| {
            open(r)?;
            let protection_id = r.array()?;
            let generation = r.u64()?;
            if generation == 0 {
                return Err(r.bad(SPEC, "a generation is at least 1"));
            }
            let flags = r.u32()?;
            if flags & !(NEEDS_FENCE | SENDS_DIFFERENCES) != 0 {
                return Err(r.unfit(SPEC, format!("flags {flags:#x}, only 1 and 2 are known")));
            }
            let (needs_fence, sends_differences) = (flags & NEEDS_FENCE != 0, flags & SENDS_DIFFERENCES != 0);
            let terms = Terms {
                heartbeat_us: r.u32()?,
                lease_us: r.u32()?,
                margin_us: r.u32()?,
                claim_interval_us: r.u32()?,
                drift_per_mille: r.u32()?,
            };
            let (nonce, mac) = (r.array()?, r.array()?);
            Ok(Self { protection_id, generation, needs_fence, sends_differences, terms, nonce, mac })
        })
    }

    /// The bytes on the wire without the MAC.
    fn signed(&self) -> Vec<u8> {
        let Terms { heartbeat_us, lease_us, margin_us, claim_interval_us, drift_per_mille } = self.terms;
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend_from_slice(&Self::MAGIC);
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.protection_id);
        out.extend_from_slice(&self.generation.to_be_bytes());
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags = flag(self.needs_fence, NEEDS_FENCE) | flag(self.sends_differences, SENDS_DIFFERENCES);
        for value in [flags, heartbeat_us, lease_us, margin_us, claim_interval_us, drift_per_mille] {
            out.extend_from_slice(&value.to_be_bytes());
        }
        out.extend_from_slice(&self.nonce);
        out
    }
}

/// The standby's answer to a hello that it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Drawn at random for this connection.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl Welcome {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 56;

    /// The answer to `hello`, bound to the connection of `binding`.
    pub fn new(nonce: [u8; 16], hello: &Hello, secret: &MigrationSecret, binding: &ChannelBinding) -> Self {
        let mac = secret.mac(WELCOME_LABEL, &[&hello.signed(), &nonce, &bound(binding)]);
        Self { nonce, mac }
    }

    /// Whether a peer that knows the secret answered this hello.
    #[must_use]
    pub fn is_authentic(&self, hello: &Hello, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(WELCOME_LABEL, &[&hello.signed(), &self.nonce, &bound(binding)], &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&Hello::MAGIC);
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.mac);
    }

    /// Reads one welcome from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or version.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "replica welcome", |r| {
            open(r)?;
            Ok(Self { nonce: r.array()?, mac: r.array()? })
        })
    }
}
