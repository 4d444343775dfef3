//! The C interface: from Rust through the same functions, and from C, Go and Python through the installed library.
//!
//! `cargo test -p sterna-capi --test capi SUBJECT::` runs the tests of one subject.
#![allow(clippy::print_stderr, reason = "a skipped test names its reason")]

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
mod installed;
mod plain;

mod c_vmm;
mod configured;
mod header;
mod languages;
mod lifetime;
mod migrate;
mod wrong_input;
