//! A connection that takes the place of one that was lost (`specs/extension.md §13`).
//!
//! Decoding a message proves nothing. [`ReconnectHello::is_authentic`] and [`ReconnectAnswer::is_authentic`] do.

use super::secret::MacBytes;
use super::{ChannelBinding, MigrationSecret};
use crate::error::WireError;
use crate::reader;

const SPEC: &str = "specs/extension.md §13";
const MAGIC: u32 = 0x5354_4e53;
const VERSION: u32 = 1;
const VERSION_BYTES: [u8; 4] = VERSION.to_be_bytes();
const HELLO_LABEL: &str = "sterna reconnect hello";
const ANSWER_LABEL: &str = "sterna reconnect answer";
const GIVES_UP: u32 = u32::MAX;
const RECOVERY: u32 = u32::MAX - 1;
const PREEMPT: u32 = u32::MAX - 2;

/// Which channel of the new session a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReconnectChannel {
    /// The main channel.
    Main,
    /// The multifd channel of this id.
    Lane(u8),
    /// None: the source says that it does not come back.
    GivesUp,
    /// The main channel of a recovery: the guest runs at the destination, and lacks pages.
    Recovery,
    /// The channel of requested pages: of a recovery, or of a session of precopy that is not the first.
    Preempt,
}

impl ReconnectChannel {
    fn code(self) -> u32 {
        match self {
            Self::Main => 0,
            Self::Lane(id) => 1 + u32::from(id),
            Self::GivesUp => GIVES_UP,
            Self::Recovery => RECOVERY,
            Self::Preempt => PREEMPT,
        }
    }
}

/// What every connection of a new session begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectHello {
    /// The id that the handover section stated.
    pub migration_id: [u8; 16],
    /// The session's number: larger with each attempt. The connections that the migration began with are session 0.
    pub session: u32,
    /// What the connection is for.
    pub channel: ReconnectChannel,
    /// Drawn at random for this connection: the answer is bound to it.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl ReconnectHello {
    /// The first four bytes of the connection, "STNS": nothing else that a destination accepts starts so.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Bytes on the wire.
    pub const BYTES: usize = 80;

    /// The hello of one connection, in the migration of that name and secret, over the connection of that binding.
    pub fn new(
        migration_id: [u8; 16],
        (session, channel): (u32, ReconnectChannel),
        nonce: [u8; 16],
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> Self {
        let mut hello = Self { migration_id, session, channel, nonce, mac: [0; 32] };
        hello.mac = secret.mac(HELLO_LABEL, &[&hello.signed(), &bound(binding)]);
        hello
    }

    /// Whether somebody who knows the secret says it, over the connection of that binding.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(HELLO_LABEL, &[&self.signed(), &bound(binding)], &self.mac)
    }

    /// All but the MAC, as on the wire.
    fn signed(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&self.migration_id);
        out.extend_from_slice(&self.session.to_be_bytes());
        out.extend_from_slice(&self.channel.code().to_be_bytes());
        out.extend_from_slice(&self.nonce);
        out
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.signed());
        out.extend_from_slice(&self.mac);
    }

    /// Reads one from the start of `buf`.
    ///
    /// # Errors
    /// A wrong magic or version, a channel that there cannot be.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "reconnect hello", |r| {
            open(r)?;
            let (migration_id, session) = (r.array()?, r.u32()?);
            let channel = match r.u32()? {
                0 => ReconnectChannel::Main,
                GIVES_UP => ReconnectChannel::GivesUp,
                RECOVERY => ReconnectChannel::Recovery,
                PREEMPT => ReconnectChannel::Preempt,
                code => match u8::try_from(code - 1) {
                    Ok(id) => ReconnectChannel::Lane(id),
                    Err(_) => return Err(r.bad(SPEC, format!("channel {code:08x} is none that there is"))),
                },
            };
            Ok(Self { migration_id, session, channel, nonce: r.array()?, mac: r.array()? })
        })
    }
}

/// What the destination holds, of the round in which the last session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holds {
    /// The last session of which it has read a page, or the end of a round, whole.
    pub session: u32,
    /// Rounds of that session whose end it has read.
    pub rounds: u64,
    /// Of the round after these, the pages that have come whole ([`encode_held`]).
    pub pages: Vec<u8>,
}

/// The answer to the hello of a main channel. [`ReconnectAnswerHead`] comes first on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReconnectAnswer {
    /// Go on.
    Holds(Holds),
    /// The migration is over here: this side does not run the guest and never will.
    Over,
}

/// The part of an answer that has a fixed length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectAnswerHead {
    is_over: bool,
    session: u32,
    rounds: u64,
    /// Bytes that follow.
    pub pages_bytes: u32,
    mac: MacBytes,
}

impl ReconnectAnswer {
    /// Appends the bytes on the wire: the answer to `hello`, which came over the connection of that binding.
    pub fn encode(
        &self,
        hello: &ReconnectHello,
        secret: &MigrationSecret,
        binding: &ChannelBinding,
        out: &mut Vec<u8>,
    ) {
        let none = Holds { session: 0, rounds: 0, pages: Vec::new() };
        let (is_over, Holds { session, rounds, pages }) = match self {
            Self::Holds(holds) => (false, holds),
            Self::Over => (true, &none),
        };
        let head = ReconnectAnswerHead {
            is_over,
            session: *session,
            rounds: *rounds,
            pages_bytes: pages.len() as u32,
            mac: [0; 32],
        };
        let signed = head.signed();
        out.extend_from_slice(&signed);
        out.extend_from_slice(&secret.mac(ANSWER_LABEL, &[&hello.signed(), &signed, pages, &bound(binding)]));
        out.extend_from_slice(pages);
    }
}

impl ReconnectAnswerHead {
    /// Bytes on the wire.
    pub const BYTES: usize = 60;

    fn signed(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&VERSION_BYTES);
        out.extend_from_slice(&(if self.is_over { 2_u32 } else { 1 }).to_be_bytes());
        out.extend_from_slice(&self.session.to_be_bytes());
        out.extend_from_slice(&self.rounds.to_be_bytes());
        out.extend_from_slice(&self.pages_bytes.to_be_bytes());
        out
    }

    /// Reads one from the start of `buf`. `most` bytes may follow.
    ///
    /// # Errors
    /// A wrong magic, version or status; more bytes than there may be.
    pub fn decode(buf: &[u8], most: u64) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, "reconnect answer", |r| {
            open(r)?;
            let is_over = match r.u32()? {
                1 => false,
                2 => true,
                other => return Err(r.bad(SPEC, format!("status {other} is not 1 or 2"))),
            };
            let (session, rounds, pages_bytes) = (r.u32()?, r.u64()?, r.u32()?);
            if u64::from(pages_bytes) > most {
                return Err(
                    r.bad(SPEC, format!("{pages_bytes} bytes about held pages, at most {most} are taken"))
                );
            }
            Ok(Self { is_over, session, rounds, pages_bytes, mac: r.array()? })
        })
    }

    /// The whole answer, with the bytes that followed. `None`: nobody who knows the secret answers just this.
    #[must_use]
    pub fn with_pages(
        self,
        pages: Vec<u8>,
        hello: &ReconnectHello,
        secret: &MigrationSecret,
        binding: &ChannelBinding,
    ) -> Option<ReconnectAnswer> {
        let parts: [&[u8]; 4] = [&hello.signed(), &self.signed(), &pages, &bound(binding)];
        let is_authentic = secret.verify(ANSWER_LABEL, &parts, &self.mac);
        is_authentic.then_some(match self.is_over {
            true => ReconnectAnswer::Over,
            false => ReconnectAnswer::Holds(Holds { session: self.session, rounds: self.rounds, pages }),
        })
    }
}

/// The most bytes that [`encode_held`] takes for blocks of so many pages.
pub fn most_held_bytes(block_pages: &[u64]) -> u64 {
    // A run takes no more bytes than it has pages, but for an empty one at the start of a block.
    block_pages.iter().map(|pages| pages.saturating_add(1)).fold(0, u64::saturating_add)
}

/// Appends one block of `pages`: run lengths in turn, of pages that are not held and of pages that are, the first of which may be 0.
/// Each is a number in groups of seven bits, the lowest first; all but the last byte have bit 7 set. `runs` are those that are held, in
/// order, apart from each other.
pub fn encode_held(pages: u64, runs: impl Iterator<Item = (u64, u64)>, out: &mut Vec<u8>) {
    let mut at = 0;
    for (first, count) in runs {
        push_number(first - at, out);
        push_number(count, out);
        at = first + count;
    }
    if at < pages {
        push_number(pages - at, out);
    }
}

/// Reads what [`encode_held`] wrote for all blocks, which have so many pages: `held` gets block, first page and count of each run.
///
/// # Errors
/// Runs that are empty, overlong or beyond a block; too few or too many bytes.
pub fn decode_held(
    bytes: &[u8],
    block_pages: &[u64],
    mut held: impl FnMut(usize, u64, u64),
) -> Result<(), WireError> {
    let mut at = 0;
    let bad = |at: usize, rule: &'static str| WireError::misbehaved("held pages", at as u64, SPEC, rule);
    for (block, &pages) in block_pages.iter().enumerate() {
        let (mut page, mut is_held) = (0, false);
        while page < pages {
            let begin = at;
            let count =
                take_number(bytes, &mut at).ok_or_else(|| bad(begin, "no number, or an overlong one"))?;
            if count == 0 && (is_held || page > 0) {
                return Err(bad(begin, "an empty run"));
            }
            if count > pages - page {
                return Err(bad(begin, "a run that ends beyond its block"));
            }
            if is_held {
                held(block, page, count);
            }
            page += count;
            is_held = !is_held;
        }
    }
    if at == bytes.len() { Ok(()) } else { Err(bad(at, "bytes after the last block")) }
}

fn push_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take_number(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        let bits = u64::from(byte & 0x7f);
        // Bits that do not fit, or a last byte that says nothing.
        if bits << shift >> shift != bits || (byte == 0 && shift > 0) {
            return None;
        }
        number |= bits << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// A connection without TLS cannot pass for one with it, whatever TLS exports.
fn bound(binding: &ChannelBinding) -> Vec<u8> {
    binding.map(|value| value.to_vec()).unwrap_or_default()
}

fn open(r: &mut reader::Reader<'_>) -> Result<(), reader::Stop> {
    if r.u32()? != MAGIC {
        return Err(r.bad(SPEC, "the magic is not \"STNS\""));
    }
    let version = r.u32()?;
    if version != VERSION {
        let rule = format!("version {version}, only {VERSION} is known: run the same Sterna on both sides");
        return Err(r.unfit(SPEC, rule));
    }
    Ok(())
}

#[cfg(test)]
#[path = "reconnect/tests.rs"]
mod tests;
