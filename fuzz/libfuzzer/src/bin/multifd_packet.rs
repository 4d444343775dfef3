//! libFuzzer binary that runs `sterna_fuzz::targets::multifd_packet`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::multifd_packet::target(data));
