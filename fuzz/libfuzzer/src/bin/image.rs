//! libFuzzer binary that runs `sterna_fuzz::targets::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::image::target(data));
