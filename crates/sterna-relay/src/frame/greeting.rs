//! The first messages of a carrier: hello, answer, confirmation (`specs/relay.md §2`).
//!
//! Decoding proves nothing. `is_authentic` does, with the session's key. A hello alone may be an old one that
//! another process sends again; only [`Confirm`] proves that the peer sent it now.

use super::error::{FrameError, Rule};
use super::key::{Binding, SessionId, SessionKey};
use super::limits::{LANES, OLDEST_VERSION, VERSION};
use super::route::RouteName;

const MAGIC: u32 = 0x5354_4e54;
const HELLO: &str = "HELLO";
const ANSWER: &str = "ANSWER";
const HELLO_LABEL: &str = "sterna relay hello";
const ANSWER_LABEL: &str = "sterna relay answer";
const CONFIRM_LABEL: &str = "sterna relay confirm";
const MAC_BYTES: usize = 32;
/// Bytes between the head and the route in version 2.
const OFFER_BYTES: usize = 4;

/// The purpose of a carrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It begins a session. The hello has the share of the key.
    Open,
    /// It belongs to a session that has begun.
    Join,
}

/// What a relay offers or accepts beyond the first version of the protocol.
///
/// The offer of the relay that connects has no cache. The answer accepts at most what was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offer {
    /// Whether bulk data may come in PACKED frames.
    pub packs: bool,
    /// Pages that the relay that accepts keeps, below 2^31: to these, frames may refer.
    pub cache_pages: u32,
}

impl Offer {
    fn code(self) -> u32 {
        u32::from(self.packs) | self.cache_pages << 1
    }

    fn from_code(code: u32) -> Self {
        Self { packs: code & 1 != 0, cache_pages: code >> 1 }
    }
}

/// The first message of a carrier, from the relay that connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Name of the session.
    pub session: SessionId,
    /// Whether the session begins.
    pub purpose: Purpose,
    /// Number of the carrier, from 0; below `lanes`.
    pub lane: u8,
    /// Number of carriers that this session has if none is broken, 1 to [`LANES`].
    pub lanes: u8,
    /// Number of the attempt, from 1: larger with each hello of the session.
    pub attempt: u32,
    /// Drawn for this carrier.
    pub nonce: [u8; 16],
    /// The share of the key; zeros if the session has begun.
    pub share: [u8; SessionKey::SHARE_BYTES],
    /// The destination at the other relay.
    pub route: RouteName,
    /// The offer of version 2. `None`: a hello of version 1, which every relay understands.
    pub offer: Option<Offer>,
    mac: [u8; MAC_BYTES],
}

impl Hello {
    /// Length of the part whose length does not depend on the route, in bytes.
    pub const HEAD_BYTES: usize = 80;
    /// Longest hello, in bytes.
    pub const MAX_BYTES: usize = Self::HEAD_BYTES + OFFER_BYTES + RouteName::MAX_BYTES + MAC_BYTES;

    /// A hello with a MAC made with `key`, bound to `binding`.
    #[allow(clippy::too_many_arguments, reason = "the fields of one message")]
    pub fn new(
        session: SessionId,
        purpose: Purpose,
        (lane, lanes): (u8, u8),
        attempt: u32,
        nonce: [u8; 16],
        share: [u8; SessionKey::SHARE_BYTES],
        route: RouteName,
        offer: Option<Offer>,
        key: &SessionKey,
        binding: &Binding,
    ) -> Self {
        let mut hello =
            Self { session, purpose, lane, lanes, attempt, nonce, share, route, offer, mac: [0; MAC_BYTES] };
        hello.mac = key.mac(HELLO_LABEL, &[&hello.signed()], binding);
        hello
    }

    /// Whether a peer with `key` sent this hello over the connection of `binding`.
    #[must_use]
    pub fn is_authentic(&self, key: &SessionKey, binding: &Binding) -> bool {
        key.verify(HELLO_LABEL, &[&self.signed()], binding, &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.signed());
        out.extend_from_slice(&self.mac);
    }

    /// Bytes of the whole hello that begins with `head`.
    ///
    /// # Errors
    /// A wrong magic or version; a route of another length than 1 to 64.
    pub fn length(head: &[u8; Self::HEAD_BYTES]) -> Result<usize, FrameError> {
        let offer = if open(HELLO, head)? >= 2 { OFFER_BYTES } else { 0 };
        match usize::from(head[27]) {
            bytes @ 1..=RouteName::MAX_BYTES => Ok(Self::HEAD_BYTES + offer + bytes + MAC_BYTES),
            _ => Err(FrameError::new(HELLO, 0, 27, Rule::Route)),
        }
    }

    /// Reads one hello from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A field that breaks a rule of `specs/relay.md §2`.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let bad = |offset, rule| FrameError::new(HELLO, 0, offset, rule);
        let Some((head, rest)) = buf.split_first_chunk::<{ Self::HEAD_BYTES }>() else { return Ok(None) };
        let length = Self::length(head)?;
        let purpose = match head[24] {
            0 => Purpose::Open,
            1 => Purpose::Join,
            other => return Err(bad(24, Rule::Purpose(other))),
        };
        let (lane, lanes) = (head[25], head[26]);
        if !(1..=LANES).contains(&lanes) || lane >= lanes {
            return Err(bad(25, Rule::Lane { lane, lanes }));
        }
        let attempt = u32_at(head, 28);
        if attempt == 0 {
            return Err(bad(28, Rule::Attempt));
        }
        let share = array(head, 48);
        if (share == [0; SessionKey::SHARE_BYTES]) != (purpose == Purpose::Join) {
            return Err(bad(48, Rule::Share));
        }
        let route_bytes = usize::from(head[27]);
        let (mut offer, mut rest) = (None, rest);
        if length > Self::HEAD_BYTES + route_bytes + MAC_BYTES {
            let Some((code, behind)) = rest.split_first_chunk() else { return Ok(None) };
            let code = u32::from_be_bytes(*code);
            if code > 1 {
                return Err(bad(Self::HEAD_BYTES, Rule::Offer(code)));
            }
            (offer, rest) = (Some(Offer::from_code(code)), behind);
        }
        let Some(route) = rest.get(..route_bytes) else { return Ok(None) };
        let at = length - MAC_BYTES - route_bytes;
        let route = RouteName::from_bytes(route).ok_or_else(|| bad(at, Rule::Route))?;
        let Some(mac) = rest[route_bytes..].first_chunk() else { return Ok(None) };
        let session = SessionId(array(head, 8));
        let nonce = array(head, 32);
        let hello = Self { session, purpose, lane, lanes, attempt, nonce, share, route, offer, mac: *mac };
        Ok(Some((hello, length)))
    }

    fn version(&self) -> u32 {
        if self.offer.is_some() { VERSION } else { OLDEST_VERSION }
    }

    fn signed(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::MAX_BYTES);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.version().to_be_bytes());
        out.extend_from_slice(&self.session.0);
        out.push(match self.purpose {
            Purpose::Open => 0,
            Purpose::Join => 1,
        });
        out.extend_from_slice(&[self.lane, self.lanes, self.route.as_str().len() as u8]);
        out.extend_from_slice(&self.attempt.to_be_bytes());
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.share);
        if let Some(offer) = self.offer {
            out.extend_from_slice(&u32::from(offer.packs).to_be_bytes());
        }
        out.extend_from_slice(self.route.as_str().as_bytes());
        out
    }
}

/// What the relay that accepts carriers says about a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The carrier is accepted once the peer has confirmed.
    Welcome,
    /// The table of routes has no such name.
    UnknownRoute,
    /// No session has this name here. The answer has no valid MAC, because this side has no key.
    UnknownSession,
    /// The session is over. The end of the stream was not passed on and never will be.
    OverNever,
    /// The session is over. The end of the stream was passed on: the guest may run at the destination.
    OverPassed,
    /// Another session of this route is open.
    RouteBusy,
    /// This relay has as many sessions as it may have.
    TooManySessions,
    /// This side has another version of the protocol. The answer has no valid MAC.
    OtherVersion,
}

const STATUSES: [(Status, u32); 8] = [
    (Status::Welcome, 0),
    (Status::UnknownRoute, 1),
    (Status::UnknownSession, 2),
    (Status::OverNever, 3),
    (Status::OverPassed, 4),
    (Status::RouteBusy, 5),
    (Status::TooManySessions, 6),
    (Status::OtherVersion, 7),
];

/// The answer to a [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Whether the carrier is accepted.
    pub status: Status,
    /// What is accepted of the offer of version 2. `None`: an answer of version 1.
    pub accepts: Option<Offer>,
    /// Drawn for this carrier.
    pub nonce: [u8; 16],
    mac: [u8; MAC_BYTES],
}

impl Answer {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 64;

    /// The answer to `hello`, with a MAC made with `key`. It accepts at most what the hello offers.
    pub fn new(
        status: Status,
        accepts: Offer,
        nonce: [u8; 16],
        hello: &Hello,
        key: &SessionKey,
        binding: &Binding,
    ) -> Self {
        let accepts = hello.offer.map(|offer| if offer.packs { accepts } else { Offer::default() });
        let mut answer = Self { status, accepts, nonce, mac: [0; MAC_BYTES] };
        answer.mac = key.mac(ANSWER_LABEL, &[&hello.signed(), &answer.signed()], binding);
        answer
    }

    /// An answer without proof, from a side that has no key of the session.
    pub fn without_proof(status: Status) -> Self {
        Self { status, accepts: None, nonce: [0; 16], mac: [0; MAC_BYTES] }
    }

    /// Whether a peer with `key` answered `hello` with this.
    #[must_use]
    pub fn is_authentic(&self, hello: &Hello, key: &SessionKey, binding: &Binding) -> bool {
        key.verify(ANSWER_LABEL, &[&hello.signed(), &self.signed()], binding, &self.mac)
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.signed());
        out.extend_from_slice(&self.mac);
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// A wrong magic or version; an unknown status; a reserved field that is not 0.
    pub fn decode(buf: &[u8; Self::BYTES]) -> Result<Self, FrameError> {
        let bad = |offset, rule| FrameError::new(ANSWER, 0, offset, rule);
        let version = open(ANSWER, buf)?;
        let number = u32_at(buf, 8);
        let status = STATUSES.iter().find(|(_, code)| *code == number);
        let (status, _) = *status.ok_or_else(|| bad(8, Rule::Status(number)))?;
        let accepts = match (version, u32_at(buf, 12)) {
            (OLDEST_VERSION, 0) => None,
            (OLDEST_VERSION, other) => return Err(bad(12, Rule::Reserved(other))),
            (_, code) => Some(Offer::from_code(code)),
        };
        if accepts.is_some_and(|accepts| !accepts.packs && accepts.cache_pages > 0) {
            return Err(bad(12, Rule::Offer(u32_at(buf, 12))));
        }
        Ok(Self { status, accepts, nonce: array(buf, 16), mac: array(buf, 32) })
    }

    fn signed(&self) -> [u8; 32] {
        let code = STATUSES.iter().find(|(status, _)| *status == self.status).map_or(0, |(_, code)| *code);
        let mut out = [0; 32];
        out[..4].copy_from_slice(&MAGIC.to_be_bytes());
        let version = if self.accepts.is_some() { VERSION } else { OLDEST_VERSION };
        out[4..8].copy_from_slice(&version.to_be_bytes());
        out[8..12].copy_from_slice(&code.to_be_bytes());
        out[12..16].copy_from_slice(&self.accepts.map_or(0, Offer::code).to_be_bytes());
        out[16..].copy_from_slice(&self.nonce);
        out
    }
}

/// The proof that the relay that connects has read the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confirm([u8; MAC_BYTES]);

impl Confirm {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = MAC_BYTES;

    /// The confirmation of `hello` and `answer`.
    pub fn new(hello: &Hello, answer: &Answer, key: &SessionKey, binding: &Binding) -> Self {
        Self(key.mac(CONFIRM_LABEL, &[&hello.signed(), &answer.signed()], binding))
    }

    /// Whether a peer with `key` confirmed `hello` and `answer` with this.
    #[must_use]
    pub fn is_authentic(&self, hello: &Hello, answer: &Answer, key: &SessionKey, binding: &Binding) -> bool {
        key.verify(CONFIRM_LABEL, &[&hello.signed(), &answer.signed()], binding, &self.0)
    }

    /// The bytes on the wire.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The confirmation of these bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

/// Checks magic and version. Returns the version.
fn open(message: &'static str, buf: &[u8]) -> Result<u32, FrameError> {
    let (magic, version) = (u32_at(buf, 0), u32_at(buf, 4));
    if magic != MAGIC {
        return Err(FrameError::new(message, 0, 0, Rule::Magic(magic)));
    }
    if !(OLDEST_VERSION..=VERSION).contains(&version) {
        return Err(FrameError::new(message, 0, 4, Rule::Version(version)));
    }
    Ok(version)
}

fn u32_at(buf: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(buf, at))
}

/// `N` bytes at `at`. The callers have checked that they exist.
fn array<const N: usize>(buf: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&buf[at..at + N]);
    out
}
