//! The configuration from which a destination makes its VM (`specs/extension.md §15`).
//!
//! The configuration itself belongs to the VMM. The settings before it are those of the source that both sides
//! must share.

use std::collections::BTreeMap;

use crate::error::WireError;
use crate::limits::CONFIGURATION_BYTES;
use crate::reader::{self, Reader, Stop};

const MESSAGE: &str = "configuration section";
const SPEC: &str = "specs/extension.md §15";
/// Most settings in one section.
const SETTINGS: usize = 64;
/// Most bytes of a setting's name, and of its value.
const WORD_BYTES: usize = 63;

/// Body of the FULL section with the source's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceConfiguration {
    /// The settings that are on at the source, by name. A setting that is missing here is off.
    pub settings: BTreeMap<String, String>,
    /// The VMM's configuration, whose form the VMM defines.
    pub configuration: Vec<u8>,
}

impl SourceConfiguration {
    /// Name of the section on the wire.
    pub const SECTION_NAME: &'static str = "sterna/configuration";
    /// Instance of the section on the wire.
    pub const SECTION_INSTANCE: u32 = 0;
    /// The only version.
    pub const SECTION_VERSION: u32 = 1;
    /// Length of the longest body in bytes.
    pub const BODY_BYTES: usize = 1 + SETTINGS * 2 * (1 + WORD_BYTES) + CONFIGURATION_BYTES;

    /// The body as it is on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for more than 64 settings, a name or value that the format cannot
    /// express, or a configuration that is too long.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let local = |rule: String| WireError::local(MESSAGE, 0, SPEC, rule);
        if self.settings.len() > SETTINGS {
            return Err(local(format!("{} settings, more than {SETTINGS}", self.settings.len())));
        }
        if self.configuration.len() > CONFIGURATION_BYTES {
            return Err(local(too_long(self.configuration.len())));
        }
        let mut body = vec![self.settings.len() as u8];
        for word in self.settings.iter().flat_map(|(name, value)| [name, value]) {
            if !is_word(word.as_bytes()) {
                return Err(local(format!("{word:?} {WORD_RULE}")));
            }
            body.push(word.len() as u8);
            body.extend_from_slice(word.as_bytes());
        }
        body.extend_from_slice(&self.configuration);
        Ok(body)
    }

    /// Reads the body of a section of `version`.
    ///
    /// # Errors
    /// An unknown version, too many settings, settings that are not in ascending order of their names, a name or a
    /// value of another form, a body that ends inside the settings, or a configuration that is too long.
    pub fn decode(version: u32, body: &[u8]) -> Result<Self, WireError> {
        if version != Self::SECTION_VERSION {
            let rule = format!("version {version}, only {} is known", Self::SECTION_VERSION);
            return Err(WireError::incompatible(MESSAGE, 0, SPEC, rule));
        }
        let decoded = reader::decode(body, MESSAGE, |r| {
            let count = usize::from(r.u8()?);
            if count > SETTINGS {
                return Err(r.bad(SPEC, format!("{count} settings, more than {SETTINGS}")));
            }
            let mut settings = BTreeMap::new();
            for _ in 0..count {
                let (name, value) = (word(r)?, word(r)?);
                if settings.last_key_value().is_some_and(|(last, _)| *last >= name) {
                    return Err(r.bad(SPEC, format!("setting {name:?} is not in the order of the names")));
                }
                settings.insert(name, value);
            }
            let configuration = r.rest();
            if configuration.len() > CONFIGURATION_BYTES {
                return Err(r.bad(SPEC, too_long(configuration.len())));
            }
            Ok(Self { settings, configuration: configuration.to_vec() })
        })?;
        let short = || WireError::misbehaved(MESSAGE, body.len() as u64, SPEC, "it ends inside the settings");
        decoded.map(|(decoded, _)| decoded).ok_or_else(short)
    }
}

/// Why a destination did not make a VM from the source's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigurationRefusal {
    /// Its VMM refused the configuration or could not make the VM. The text is the VMM's.
    Vm(String),
    /// It does not accept a setting of the source.
    Setting {
        /// Name of the setting.
        name: String,
        /// The destination's limit, as text.
        limit: String,
    },
    /// Another reason, as text.
    Other(String),
}

impl ConfigurationRefusal {
    /// Most bytes of the text. A longer one is cut.
    const TEXT_BYTES: usize = 440;

    /// The kind on the wire, the setting's name or nothing, and the text, which is not too long.
    pub(crate) fn parts(&self) -> (u8, &str, &str) {
        let (kind, name, text) = match self {
            Self::Vm(text) => (1, "", text),
            Self::Setting { name, limit } => (2, name.as_str(), limit),
            Self::Other(text) => (3, "", text),
        };
        let mut length = text.len().min(Self::TEXT_BYTES);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        (kind, name, &text[..length])
    }

    /// Reads a refusal of `length` bytes.
    pub(crate) fn read(r: &mut Reader<'_>, length: usize) -> Result<Self, Stop> {
        let end = r.at() + length;
        let kind = r.u8()?;
        let name = match kind {
            2 => word(r)?,
            _ => String::new(),
        };
        let left = end.saturating_sub(r.at());
        if left > Self::TEXT_BYTES {
            return Err(r.bad(SPEC, format!("a text of {left} bytes")));
        }
        let bytes = r.take(left)?;
        let text = r.text(bytes)?.to_owned();
        match kind {
            1 => Ok(Self::Vm(text)),
            2 => Ok(Self::Setting { name, limit: text }),
            3 => Ok(Self::Other(text)),
            other => Err(r.bad(SPEC, format!("a refusal of kind {other}; only 1 to 3 are known"))),
        }
    }

    /// Shortest and longest refusal, in bytes.
    pub(crate) const LENGTHS: std::ops::RangeInclusive<usize> = 1..=1 + 1 + WORD_BYTES + Self::TEXT_BYTES;

    /// Checks that the message can express the refusal.
    pub(crate) fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Setting { name, .. } if !is_word(name.as_bytes()) => {
                Err(WireError::local("return path message", 4, SPEC, format!("{name:?} {WORD_RULE}")))
            }
            _ if self.parts().2.contains('\0') => {
                Err(WireError::local("return path message", 4, SPEC, "a text with NUL"))
            }
            _ => Ok(()),
        }
    }
}

const WORD_RULE: &str = "is not 1 to 63 of a to z, 0 to 9, '-' and '.'";

fn is_word(bytes: &[u8]) -> bool {
    let fits = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(byte);
    (1..=WORD_BYTES).contains(&bytes.len()) && bytes.iter().all(fits)
}

/// A name or a value.
fn word(r: &mut Reader<'_>) -> Result<String, Stop> {
    let length = usize::from(r.u8()?);
    let bytes = r.take(length)?;
    if !is_word(bytes) {
        return Err(r.bad(SPEC, format!("a word of {length} bytes {WORD_RULE}")));
    }
    Ok(r.text(bytes)?.to_owned())
}

fn too_long(bytes: usize) -> String {
    format!("a configuration of {bytes} bytes, more than {CONFIGURATION_BYTES}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> SourceConfiguration {
        let settings = [("multifd-channels", "4"), ("multifd-compression", "zstd"), ("postcopy-ram", "on")];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        SourceConfiguration { settings, configuration: b"{\"vcpus\":2}".to_vec() }
    }

    #[test]
    fn section_round_trips_and_is_refused_when_cut_inside_the_settings() {
        let body = example().encode().unwrap();
        assert_eq!(SourceConfiguration::decode(1, &body), Ok(example()));
        let settings = body.len() - example().configuration.len();
        for cut in 0..settings {
            let refused = SourceConfiguration::decode(1, &body[..cut]).unwrap_err().to_string();
            assert!(refused.contains("inside the settings"), "{cut}: {refused}");
        }
        let nothing = SourceConfiguration::decode(1, &[0]).unwrap();
        assert_eq!(nothing, SourceConfiguration::default());
        assert!(SourceConfiguration::decode(2, &body).unwrap_err().to_string().contains("version 2"));
    }

    #[test]
    fn settings_have_one_order_and_one_form() {
        for (bytes, why) in [
            (&b"\x02\x01b\x01x\x01a\x01x"[..], "order"),
            (b"\x02\x01a\x01x\x01a\x01y", "order"),
            (b"\x01\x00\x01x", "0 bytes"),
            (b"\x01\x01A\x01x", "1 to 63"),
            (b"\x01\x01a\x02x\n", "1 to 63"),
            (&[65], "65 settings"),
        ] {
            let refused = SourceConfiguration::decode(1, bytes).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn configuration_has_a_limit_on_both_sides() {
        let most = SourceConfiguration { configuration: vec![7; CONFIGURATION_BYTES], ..example() };
        let body = most.encode().unwrap();
        assert!(body.len() <= SourceConfiguration::BODY_BYTES);
        assert_eq!(SourceConfiguration::decode(1, &body), Ok(most.clone()));
        let more = SourceConfiguration { configuration: vec![7; CONFIGURATION_BYTES + 1], ..most };
        assert!(more.encode().unwrap_err().to_string().contains("1048577 bytes"));
        assert!(SourceConfiguration::decode(1, &[&body[..], b"x"].concat()).is_err());
        let spaced = [("a name".to_owned(), "x".to_owned())].into();
        assert!(SourceConfiguration { settings: spaced, configuration: Vec::new() }.encode().is_err());
    }
}
