//! libFuzzer binary that runs `sterna_fuzz::targets::mapped_ram`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::mapped_ram::target(data));
