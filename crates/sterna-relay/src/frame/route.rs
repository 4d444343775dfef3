//! Names of routes.

use std::fmt;
use std::str::FromStr;

/// The name of a destination in the table of the relay that accepts carriers.
///
/// 1 to 64 letters, digits, `.`, `_` or `-`. The first character is not `.`, so that a name is a file's name and
/// leads out of no directory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteName(String);

impl RouteName {
    /// Longest name, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        let fits = (1..=Self::MAX_BYTES).contains(&bytes.len());
        if !fits || bytes[0] == b'.' || !bytes.iter().all(is_allowed) {
            return None;
        }
        std::str::from_utf8(bytes).ok().map(|text| Self(text.to_owned()))
    }
}

impl FromStr for RouteName {
    type Err = BadRouteName;

    fn from_str(text: &str) -> Result<Self, BadRouteName> {
        Self::from_bytes(text.as_bytes()).ok_or_else(|| BadRouteName(text.to_owned()))
    }
}

impl fmt::Display for RouteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that is no route's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a route: use 1 to 64 letters, digits, `.`, `_` or `-`, and no `.` at the start")]
pub struct BadRouteName(String);
