//! libFuzzer binary that runs `sterna_fuzz::targets::ch_offload`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::ch_offload::target(data));
