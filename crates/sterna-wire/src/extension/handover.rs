//! The name of one migration (`specs/extension.md §2`).

use crate::error::WireError;

const MESSAGE: &str = "handover section";
const SPEC: &str = "specs/extension.md §2";

/// Body of the FULL section that gives the migration its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handover {
    /// 16 bytes that the source drew at random.
    pub migration_id: [u8; 16],
}

impl Handover {
    /// Name of the section.
    pub const SECTION_NAME: &'static str = "sterna/handover";
    /// Its instance.
    pub const SECTION_INSTANCE: u32 = 0;
    /// Its version.
    pub const SECTION_VERSION: u32 = 1;
    /// Length of its body in bytes.
    pub const BODY_BYTES: usize = 16;

    /// The body as it is on the wire.
    pub fn encode(&self) -> [u8; Self::BODY_BYTES] {
        self.migration_id
    }

    /// Reads the body of a section.
    ///
    /// # Errors
    /// A body that is not 16 bytes, or all zero.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let Ok(migration_id) = <[u8; 16]>::try_from(body) else {
            let rule = format!("{} bytes, not {}", body.len(), Self::BODY_BYTES);
            return Err(WireError::misbehaved(MESSAGE, 0, SPEC, rule));
        };
        if migration_id == [0; 16] {
            return Err(WireError::misbehaved(MESSAGE, 0, SPEC, "the migration's id is all zero"));
        }
        Ok(Self { migration_id })
    }
}
