//! Integration tests of this crate, one module per subject, in one program, so that only one is linked.
//!
//! `cargo test -p sterna-guests --test guests SUBJECT::` runs the tests of one subject.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/kvm.rs"]
mod machine;

mod checker;
mod process;
mod throttle;
mod tide;
