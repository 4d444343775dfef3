//! `--compress`.

use std::fmt;
use std::str::FromStr;

/// Whether a relay compresses what it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// It sends plain bytes.
    #[default]
    Off,
    /// It compresses with this level of zstd, 1 to 19, and refers to pages.
    Zstd(u8),
    /// As `zstd:1`, but only while this makes the migration faster or its bytes fewer.
    Auto,
}

impl Mode {
    /// Level of zstd if none is given, and of `auto`.
    pub const LEVEL: u8 = 1;
    /// Highest level.
    pub const MOST: u8 = 19;

    /// The level of zstd.
    pub fn level(self) -> u8 {
        if let Self::Zstd(level) = self { level } else { Self::LEVEL }
    }
}

/// A text that is no [`Mode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not off, auto, zstd or zstd:LEVEL with a level from 1 to {most}", most = Mode::MOST)]
pub struct BadMode(String);

impl FromStr for Mode {
    type Err = BadMode;

    fn from_str(text: &str) -> Result<Self, BadMode> {
        let bad = || BadMode(text.to_owned());
        match (text, text.strip_prefix("zstd:")) {
            ("off", _) => Ok(Self::Off),
            ("auto", _) => Ok(Self::Auto),
            ("zstd", _) => Ok(Self::Zstd(Self::LEVEL)),
            (_, Some(level)) => match level.parse() {
                Ok(level @ 1..=Self::MOST) => Ok(Self::Zstd(level)),
                _ => Err(bad()),
            },
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}
