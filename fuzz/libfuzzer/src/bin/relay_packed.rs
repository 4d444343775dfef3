//! libFuzzer binary that runs `sterna_fuzz::targets::relay_packed`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::relay_packed::target(data));
