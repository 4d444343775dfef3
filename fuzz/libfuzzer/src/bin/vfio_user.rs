//! libFuzzer binary that runs `sterna_fuzz::targets::vfio_user`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_fuzz::targets::vfio_user::target(data));
