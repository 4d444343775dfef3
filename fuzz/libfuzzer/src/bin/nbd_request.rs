//! libFuzzer binary that runs `sterna_fuzz::targets::nbd_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::nbd_request::target(data));
