//! libFuzzer binary that runs `sterna_fuzz::targets::rdma_control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::rdma_control::target(data));
