//! libFuzzer binary that runs `sterna_fuzz::targets::received_pages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::received_pages::target(data));
