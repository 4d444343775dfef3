//! The JSON description (vmdesc) after the stream.

use sterna_wire::vmdesc;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    if let Ok(lengths) = vmdesc::section_lengths(data) {
        assert!(vmdesc::parse(data).is_ok());
        assert!(lengths.len() <= data.len());
    }
}
