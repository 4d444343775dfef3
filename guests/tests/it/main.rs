//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-guests --test it SUBJECT::` runs those of one subject.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/kvm.rs"]
mod machine;

mod checker;
mod process;
mod throttle;
mod tide;
