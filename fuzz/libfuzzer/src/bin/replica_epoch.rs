//! libFuzzer binary that runs `sterna_fuzz::targets::replica_epoch`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::replica_epoch::target(data));
