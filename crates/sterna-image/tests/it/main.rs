//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-image --test it SUBJECT::` runs those of one subject.

#[path = "../common/mod.rs"]
mod common;

mod convert;
mod golden;
mod hostile;
mod of_0_1;
mod shapes;
mod tools;
