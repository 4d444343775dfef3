//! libFuzzer binary that runs `sterna_fuzz::targets::image_tools`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::image_tools::target(data));
