//! Which arbiter a side asks (`specs/replica.md §1`).

use super::SPEC;
use crate::error::WireError;
use crate::reader::{Reader, Stop};

/// What a side says of its arbiter behind the greeting. [`super::Session::seal_arbiter`] and [`super::Session::open_arbiter`] put it on the
/// wire.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ArbiterIdentity {
    /// What its operator calls it; for people.
    pub name: String,
    /// What is found there.
    pub store: ArbiterStore,
}

/// What a side has found in its arbiter's own store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ArbiterStore {
    /// That kind of arbiter keeps nothing that could be read.
    #[default]
    Nothing,
    /// What is kept there for this protection: one who sees it sees the same store.
    Token(String),
    /// It cannot be asked now, because of this.
    OutOfReach(String),
}

impl ArbiterIdentity {
    /// The longest name.
    pub const MOST_NAME_BYTES: usize = 1024;
    /// The longest token, or reason.
    pub const MOST_TOKEN_BYTES: usize = 255;
    /// Bytes that say how long the rest is.
    pub const HEAD_BYTES: usize = 4;
    /// Bytes behind the texts.
    pub const MAC_BYTES: usize = 32;

    /// Whether two sides that say this ask one arbiter. Where neither keeps anything, equal names have to do: then it cannot be proved.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.store, &other.store) {
            (ArbiterStore::Token(ours), ArbiterStore::Token(theirs)) => ours == theirs,
            (ArbiterStore::Nothing, ArbiterStore::Nothing) => self.name == other.name,
            _ => false,
        }
    }

    /// How many bytes follow the head.
    ///
    /// # Errors
    /// A broken rule.
    pub fn rest_bytes(head: [u8; Self::HEAD_BYTES]) -> Result<usize, WireError> {
        match read_head(&mut Reader::new(&head, MESSAGE)) {
            Ok((name, _, token)) => Ok(name + token + Self::MAC_BYTES),
            Err(Stop::Bad(error)) => Err(error),
            // The head is whole.
            Err(Stop::Short(_)) => Ok(Self::MAC_BYTES),
        }
    }

    /// What is authenticated.
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

/// Length of the name, kind of the store, length of what is said of it.
fn read_head(r: &mut Reader<'_>) -> Result<(usize, u8, usize), Stop> {
    let name = usize::from(r.u16()?);
    if name > ArbiterIdentity::MOST_NAME_BYTES {
        return Err(r.bad(SPEC, format!("an arbiter's name of {name} bytes, at most 1024 are permitted")));
    }
    let kind = r.u8()?;
    if kind > OUT_OF_REACH {
        return Err(r.bad(SPEC, format!("kind {kind} of an arbiter's store, and 0 to 2 are known")));
    }
    let text = usize::from(r.u8()?);
    if (kind == NOTHING) != (text == 0) {
        return Err(r.bad(SPEC, "an arbiter that keeps nothing has no token, and any other has one"));
    }
    Ok((name, kind, text))
}
