//! The description after the stream.

use sterna_wire::vmdesc;

/// Takes one input.
pub fn target(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(lengths) = vmdesc::section_lengths(text) {
        assert!(vmdesc::parse(text).is_ok());
        assert!(lengths.len() <= text.len());
    }
}
