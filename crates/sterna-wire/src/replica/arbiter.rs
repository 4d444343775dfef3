//! The identity of the arbiter that each side uses (`specs/replica.md §1`).
//!
//! Two different arbiters could both give the claim, and the guest would run twice.

use super::opening::SPEC;
use crate::error::WireError;
use crate::reader::{Reader, Stop};

/// A side's statement about its arbiter, sent directly after the greeting.
///
/// [`super::Session::seal_arbiter`] and [`super::Session::open_arbiter`] encode and decode it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ArbiterIdentity {
    /// The operator's name for the arbiter, for people.
    pub name: String,
    /// Content of the arbiter's store.
    pub store: ArbiterStore,
}

/// Content that a side has found in its arbiter's store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ArbiterStore {
    /// This kind of arbiter keeps nothing that a side could read.
    #[default]
    Nothing,
    /// A random token of this protection. Two sides that read the same token use the same store.
    Token(String),
    /// The store cannot be reached now. The text is the reason.
    OutOfReach(String),
}

impl ArbiterIdentity {
    /// Longest name, in bytes.
    pub const MOST_NAME_BYTES: usize = 1024;
    /// Longest token or reason, in bytes.
    pub const MOST_TOKEN_BYTES: usize = 255;
    /// Length of the head, which states the lengths of the texts, in bytes.
    pub const HEAD_BYTES: usize = 4;
    /// Length of the MAC after the texts, in bytes.
    pub const MAC_BYTES: usize = 32;

    /// Whether two sides with these statements use one arbiter.
    ///
    /// If neither arbiter keeps anything, equal names are sufficient, but they prove nothing.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.store, &other.store) {
            (ArbiterStore::Token(ours), ArbiterStore::Token(theirs)) => ours == theirs,
            (ArbiterStore::Nothing, ArbiterStore::Nothing) => self.name == other.name,
            _ => false,
        }
    }

    /// Number of bytes after the head.
    ///
    /// # Errors
    /// A name above 1024 bytes; an unknown kind; a text that contradicts the kind.
    pub fn rest_bytes(head: [u8; Self::HEAD_BYTES]) -> Result<usize, WireError> {
        match read_head(&mut Reader::new(&head, MESSAGE)) {
            Ok((name, _, token)) => Ok(name + token + Self::MAC_BYTES),
            Err(Stop::Bad(error)) => Err(error),
            // The head is complete, so this case does not occur.
            Err(Stop::Short(_)) => Ok(Self::MAC_BYTES),
        }
    }

    /// The bytes that the MAC covers.
    pub(super) fn body(&self) -> Result<Vec<u8>, WireError> {
        let (kind, text) = self.store.to_wire();
        let local = |rule: &'static str| WireError::local(MESSAGE, 0, SPEC, rule);
        let name_bytes = u16::try_from(self.name.len()).ok();
        let name_bytes = name_bytes.filter(|bytes| usize::from(*bytes) <= Self::MOST_NAME_BYTES);
        let name_bytes = name_bytes.ok_or_else(|| local("an arbiter's name has at most 1024 bytes"))?;
        let text_bytes =
            u8::try_from(text.len()).map_err(|_| local("an arbiter's token has at most 255 bytes"))?;
        let mut out = Vec::with_capacity(Self::HEAD_BYTES + self.name.len() + text.len());
        out.extend_from_slice(&name_bytes.to_be_bytes());
        out.extend_from_slice(&[kind, text_bytes]);
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(text.as_bytes());
        Ok(out)
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Stop> {
        let (name, kind, text) = read_head(r)?;
        let name = r.take(name)?;
        let name = r.text(name)?.to_owned();
        let text = r.take(text)?;
        let text = r.text(text)?.to_owned();
        let store = match kind {
            NOTHING => ArbiterStore::Nothing,
            TOKEN => ArbiterStore::Token(text),
            _ => ArbiterStore::OutOfReach(text),
        };
        Ok(Self { name, store })
    }
}

impl ArbiterStore {
    fn to_wire(&self) -> (u8, &str) {
        match self {
            Self::Nothing => (NOTHING, ""),
            Self::Token(token) => (TOKEN, token),
            Self::OutOfReach(why) => (OUT_OF_REACH, why),
        }
    }
}

pub(super) const MESSAGE: &str = "replica arbiter";

const NOTHING: u8 = 0;
const TOKEN: u8 = 1;
const OUT_OF_REACH: u8 = 2;

/// Reads the length of the name, the store's kind, and the length of its text.
fn read_head(r: &mut Reader<'_>) -> Result<(usize, u8, usize), Stop> {
    let name = usize::from(r.u16()?);
    if name > ArbiterIdentity::MOST_NAME_BYTES {
        return Err(r.bad(SPEC, format!("an arbiter's name of {name} bytes, at most 1024 are permitted")));
    }
    let kind = r.u8()?;
    if kind > OUT_OF_REACH {
        return Err(r.bad(SPEC, format!("kind {kind} of an arbiter's store; only 0 to 2 are known")));
    }
    let text = usize::from(r.u8()?);
    if (kind == NOTHING) != (text == 0) {
        return Err(r.bad(SPEC, "an arbiter that stores nothing has no token, and any other arbiter has one"));
    }
    Ok((name, kind, text))
}
