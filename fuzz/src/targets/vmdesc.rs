//! The description after the stream.

use sterna_wire::vmdesc;

/// One input.
pub fn target(data: &[u8]) {
    if let Ok(lengths) = vmdesc::section_lengths(data) {
        assert!(vmdesc::parse(data).is_ok());
        assert!(lengths.len() <= data.len());
    }
}
