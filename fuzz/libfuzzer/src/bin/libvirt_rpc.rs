//! libFuzzer binary that runs `sterna_fuzz::targets::libvirt_rpc`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::libvirt_rpc::target(data));
