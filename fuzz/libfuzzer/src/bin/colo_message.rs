//! libFuzzer binary that runs `sterna_fuzz::targets::colo_message`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::colo_message::target(data));
