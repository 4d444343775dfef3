//! The integration tests of this crate, one module for each subject. They are one program, so that only one is
//! linked.
//!
//! `cargo test -p sterna-image --test images SUBJECT::` runs the tests of one subject.

#[path = "../common/mod.rs"]
mod common;

mod convert;
mod formats;
mod framed;
mod golden;
mod hostile;
mod of_0_1;
mod shapes;
mod tools;
