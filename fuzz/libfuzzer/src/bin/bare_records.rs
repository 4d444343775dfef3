//! libFuzzer binary that runs `sterna_fuzz::targets::bare_records`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::bare_records::target(data));
