//! Fuzz targets: the decoders of Sterna, fed with untrusted bytes.
//!
//! [`targets`] contains the fuzz targets. Two programs run them: libFuzzer's binaries (`fuzz/libfuzzer`), which
//! explore, and `sterna-fuzz`. The latter runs the stored inputs and a fixed number of inputs that it mutates
//! from them with a fixed seed. [`corpus`] stores inputs, [`mutate`] changes them, [`check`] runs them and
//! reports failures.
#![forbid(unsafe_code)]

pub mod check;
pub mod corpus;
pub mod mutate;
pub mod targets;
