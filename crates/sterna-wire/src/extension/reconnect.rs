//! The first messages of a connection that replaces a lost one (`specs/extension.md §13`).
//!
//! With them the source learns which pages the destination has stored, so that it sends only the missing ones.
//! Decoding a message proves nothing. [`ReconnectHello::is_authentic`] and [`ReconnectAnswerHead::with_pages`]
//! check the MAC.

use super::secret::MacBytes;
use super::secret::MigrationSecret;
use super::status::ChannelBinding;
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

/// The purpose of a connection within the new session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReconnectChannel {
    /// The main channel of precopy.
    Main,
    /// The multifd channel with this id.
    Lane(u8),
    /// No channel: the source announces that it does not reconnect.
    GivesUp,
    /// The main channel of a recovery: the guest runs at the destination without all pages.
    Recovery,
    /// The preempt channel of a recovery, or of a later session of precopy.
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

/// The first message of every connection of a new session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectHello {
    /// The id from the handover section.
    pub migration_id: [u8; 16],
    /// The session's number, which grows with each attempt. The first connections of a migration are session 0.
    pub session: u32,
    /// The purpose of the connection.
    pub channel: ReconnectChannel,
    /// Drawn at random for this connection. The answer's MAC covers it, so that an old answer cannot be
    /// replayed.
    pub nonce: [u8; 16],
    mac: MacBytes,
}

impl ReconnectHello {
    /// The first four bytes of the connection, "STNS". No other kind of connection starts with them.
    pub const MAGIC: [u8; 4] = MAGIC.to_be_bytes();
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 80;

    /// The hello of one connection, authenticated with `secret` and bound to `binding`.
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

    /// Whether a peer that knows the secret sent this hello over the connection of `binding`.
    #[must_use]
    pub fn is_authentic(&self, secret: &MigrationSecret, binding: &ChannelBinding) -> bool {
        secret.verify(HELLO_LABEL, &[&self.signed(), &bound(binding)], &self.mac)
    }

    /// The bytes on the wire without the MAC.
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

    /// Reads one hello from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A wrong magic or version; an unknown channel number.
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
                    Err(_) => return Err(r.bad(SPEC, format!("channel {code:08x} does not exist"))),
                },
            };
            Ok(Self { migration_id, session, channel, nonce: r.array()?, mac: r.array()? })
        })
    }
}

/// The destination's progress in the round in which the last session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holds {
    /// The last session in which the destination read a page or a round's end.
    pub session: u32,
    /// Number of rounds of that session whose end the destination has read.
    pub rounds: u64,
    /// The pages that arrived complete after these rounds, as [`encode_held`] encodes them.
    pub pages: Vec<u8>,
}

/// The answer to the hello of a main channel. [`ReconnectAnswerHead`] precedes it on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReconnectAnswer {
    /// The migration continues. The source sends the pages that the destination does not have.
    Holds(Holds),
    /// The migration is over: the destination does not run the guest and never will.
    Over,
}

/// The part of an answer that has a fixed length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectAnswerHead {
    is_over: bool,
    session: u32,
    rounds: u64,
    /// Bytes of encoded pages that follow.
    pub pages_bytes: u32,
    mac: MacBytes,
}

impl ReconnectAnswer {
    /// Appends the answer to `hello`, bound to the connection of `binding`.
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
    /// Length on the wire, in bytes.
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

    /// Reads one head from the start of `buf`. `most`: the largest accepted number of bytes after the head.
    ///
    /// # Errors
    /// A wrong magic, version or status; more than `most` bytes announced.
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
                return Err(r.bad(
                    SPEC,
                    format!("{pages_bytes} bytes about held pages; at most {most} are accepted"),
                ));
            }
            Ok(Self { is_over, session, rounds, pages_bytes, mac: r.array()? })
        })
    }

    /// The whole answer, made of this head and the bytes after it.
    ///
    /// `None` if the MAC is wrong: the peer does not know the secret, or the bytes were changed.
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

/// Upper bound in bytes of the output of [`encode_held`] for blocks of so many pages.
pub fn most_held_bytes(block_pages: &[u64]) -> u64 {
    // A run takes at most as many bytes as it has pages. The exception is an empty run at the start of a block.
    block_pages.iter().map(|pages| pages.saturating_add(1)).fold(0, u64::saturating_add)
}

/// Appends one block of `pages`: run lengths of missing and stored pages in turn.
///
/// The first run (missing pages) may be 0. Each length is a number in groups of seven bits, lowest first. All
/// bytes but the last have bit 7 set. `runs` lists the stored pages as (first, count), in order, with gaps
/// between the runs.
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

/// Reads the output of [`encode_held`] for all blocks, which have so many pages.
///
/// Calls `held` for each run of stored pages with block, first page and count.
///
/// # Errors
/// An empty or overlong run, a run beyond its block, too few or too many bytes.
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
                take_number(bytes, &mut at).ok_or_else(|| bad(begin, "a missing or overlong number"))?;
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
        // Bits that do not fit into 64, or a last byte of zero: the same number has a shorter encoding.
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

/// The binding's bytes for the MAC. Empty without TLS, so a connection without TLS never has the MAC of one
/// with TLS.
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
