//! The decoders of Sterna, fed with bytes that nobody vouches for.
//!
//! [`targets`] holds what is fuzzed. Two programs feed it: libFuzzer's binaries (`fuzz/libfuzzer`), which explore, and
//! `sterna-fuzz`, which runs the stored inputs and a fixed number of inputs mutated from them, by a fixed seed.
//! [`corpus`] keeps the stored inputs, [`mutate`] changes them, [`check`] runs them and catches what fails.
#![forbid(unsafe_code)]

pub mod check;
pub mod corpus;
pub mod mutate;
pub mod targets;
