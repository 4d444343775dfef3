//! libFuzzer binary that runs `sterna_fuzz::targets::s3_lists`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::s3_lists::target(data));
