//! libFuzzer binary that runs `sterna_fuzz::targets::uffd_handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::uffd_handshake::target(data));
