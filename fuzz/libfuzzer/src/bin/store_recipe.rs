//! libFuzzer binary that runs `sterna_fuzz::targets::store_recipe`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::store_recipe::target(data));
