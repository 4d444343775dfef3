//! VERSION: the first message, and what both sides can do (specs/vfio-user.md §3).

use serde::{Deserialize, Serialize};

use super::error::WireError;
use super::limits::MAX_DATA_BYTES;
use super::reader::Payload;

/// The most bytes of capabilities that are looked at.
const MAX_TEXT_BYTES: usize = 16 << 10;

/// A version, and capabilities as JSON with a NUL behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Must be the same on both sides.
    pub major: u16,
    /// The answer's must not be above the question's.
    pub minor: u16,
    /// What the sender can do.
    pub capabilities: Capabilities,
}

/// What a side can do; what it does not name has the value below.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Descriptors that it takes with one message.
    pub max_msg_fds: u32,
    /// Data bytes that it takes in one message.
    pub max_data_xfer_size: u32,
    /// Regions of guest RAM that it takes.
    pub max_dma_maps: u32,
    /// Page sizes for [`super::DmaMap`]: a bit for each.
    pub pgsizes: u64,
    /// What it can do in migrations, if it can migrate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationCapability>,
}

/// What a side can do in migrations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigrationCapability {
    /// Bytes of a page in dirty bitmaps.
    pub pgsize: u64,
    /// Bytes of the longest bitmap.
    pub max_bitmap_size: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_msg_fds: 1,
            max_data_xfer_size: MAX_DATA_BYTES,
            max_dma_maps: 65_535,
            pgsizes: 4096,
            migration: None,
        }
    }
}

impl Default for MigrationCapability {
    fn default() -> Self {
        Self { pgsize: 4096, max_bitmap_size: 256 << 20 }
    }
}

#[derive(Serialize, Deserialize, Default)]
struct Text {
    #[serde(default)]
    capabilities: Capabilities,
}

impl Version {
    /// The version that this code speaks.
    pub const MAJOR: u16 = 0;
    /// As above.
    pub const MINOR: u16 = 1;

    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [self.major.to_le_bytes(), self.minor.to_le_bytes()].concat();
        let text = Text { capabilities: self.capabilities.clone() };
        // Plain numbers under plain names: this cannot fail.
        bytes.extend(serde_json::to_vec(&text).unwrap_or_default());
        bytes.push(0);
        bytes
    }

    /// Out of a payload.
    ///
    /// # Errors
    /// It is too short or too long, or the capabilities are no JSON of the right form.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        let (major, minor) = (payload.u16("major")?, payload.u16("minor")?);
        let (message, at) = (payload.message(), payload.place());
        let refuse = |why: String| Err(WireError::Text { message, at, why });
        let text = payload.rest();
        if text.len() > MAX_TEXT_BYTES {
            return refuse(format!(
                "{} bytes of capabilities; at most {MAX_TEXT_BYTES} are read",
                text.len()
            ));
        }
        let text = match text.split_last() {
            None => return Ok(Self { major, minor, capabilities: Capabilities::default() }),
            Some((0, text)) => text,
            Some(_) => return refuse("the capabilities do not end in a zero byte".into()),
        };
        let text: Text = match serde_json::from_slice(text) {
            Ok(text) => text,
            Err(error) => return refuse(format!("the capabilities cannot be read: {error}")),
        };
        Ok(Self { major, minor, capabilities: text.capabilities })
    }
}
