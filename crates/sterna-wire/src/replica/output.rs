//! Output of a guest that waits for its checkpoint (`specs/replica.md §4`).
//!
//! The checkpoint contains this output, so that a takeover can send it.

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "output of a checkpoint";

/// Output that waits for its checkpoint, as the checkpoint contains it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// Number of bytes that the guest had sent before.
    pub position: u64,
    /// The following bytes of the guest, which were not released before the checkpoint.
    pub bytes: Vec<u8>,
}

impl Output {
    /// Name of the section in a checkpoint.
    pub const SECTION_NAME: &str = "sterna/output";
    /// Instance of the section.
    pub const SECTION_INSTANCE: u32 = 0;
    /// Version of its body.
    pub const SECTION_VERSION: u32 = 1;

    /// Most bytes of a body that a standby loads.
    pub const MOST_BYTES: usize = 16 << 20;

    /// The body of the section.
    pub fn encode(&self) -> Vec<u8> {
        [&self.position.to_be_bytes()[..], &self.bytes].concat()
    }

    /// Reads the body of a section.
    ///
    /// # Errors
    /// The body has fewer than 8 bytes.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let head = reader::decode(body, MESSAGE, |r| r.u64())?;
        let Some((position, used)) = head else {
            return Err(WireError::misbehaved(
                MESSAGE,
                0,
                "specs/replica.md §4",
                "it has fewer than 8 bytes".to_owned(),
            ));
        };
        Ok(Self { position, bytes: body[used..].to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_read_as_it_was_written_and_a_short_one_is_refused() {
        let output = Output { position: 7, bytes: b"said".to_vec() };
        let body = output.encode();
        assert_eq!(Output::decode(&body).unwrap(), output);
        assert_eq!(Output::decode(&body[..8]).unwrap(), Output { position: 7, bytes: Vec::new() });
        for length in 0..8 {
            assert!(Output::decode(&body[..length]).is_err());
        }
    }
}
