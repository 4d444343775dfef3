//! The description after the stream.
#![no_main]

use sterna_wire::vmdesc;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(lengths) = vmdesc::section_lengths(text) {
        assert!(vmdesc::parse(text).is_ok());
        assert!(lengths.len() <= text.len());
    }
});
