//! libFuzzer binary that runs `sterna_fuzz::targets::store_layers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::store_layers::target(data));
