//! VERSION, the first message: both sides' versions and capabilities (specs/vfio-user.md §3).

use serde::{Deserialize, Serialize};

use super::error::WireError;
use super::limits::MAX_DATA_BYTES;
use super::reader::Payload;

/// Highest length of the capabilities in bytes.
const MAX_TEXT_BYTES: usize = 16 << 10;

/// A version, and capabilities as JSON that ends with a NUL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Major version, which must be equal on both sides.
    pub major: u16,
    /// Minor version. The answer's must not be greater than the request's.
    pub minor: u16,
    /// Capabilities of the message's sender.
    pub capabilities: Capabilities,
}

/// Capabilities of a side. A missing one has the default value below.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Highest number of descriptors that the side accepts with one message.
    pub max_msg_fds: u32,
    /// Highest number of data bytes that the side accepts in one message.
    pub max_data_xfer_size: u32,
    /// Highest number of regions of guest RAM that the side accepts.
    pub max_dma_maps: u32,
    /// Page sizes for [`super::DmaMap`], one bit per size.
    pub pgsizes: u64,
    /// Migration capability. `None` if the side cannot migrate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationCapability>,
}

/// Migration capability of a side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigrationCapability {
    /// Size of a page in dirty bitmaps, in bytes.
    pub pgsize: u64,
    /// Length of the longest bitmap in bytes.
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
    /// Major version that this code implements.
    pub const MAJOR: u16 = 0;
    /// Minor version that this code implements.
    pub const MINOR: u16 = 1;

    /// Encodes version and capabilities as a payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [self.major.to_le_bytes(), self.minor.to_le_bytes()].concat();
        let text = Text { capabilities: self.capabilities.clone() };
        // Cannot fail: the text consists of plain numbers under plain names.
        bytes.extend(serde_json::to_vec(&text).unwrap_or_default());
        bytes.push(0);
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// The payload is too short or too long, or the capabilities are not JSON of the required form.
    pub fn decode(mut payload: Payload<'_>) -> Result<Self, WireError> {
        let (major, minor) = (payload.u16("major")?, payload.u16("minor")?);
        let (message, at) = (payload.message(), payload.place());
        let refuse = |why: String| Err(WireError::Text { message, at, why });
        let text = payload.rest();
        if text.len() > MAX_TEXT_BYTES {
            return refuse(format!(
                "{} bytes of capabilities; at most {MAX_TEXT_BYTES} are accepted",
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
