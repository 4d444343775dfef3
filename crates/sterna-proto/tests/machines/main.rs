//! Integration tests of this crate, one module per subject, in one program, so that only one is
//! linked.
//!
//! `cargo test -p sterna-proto --test machines SUBJECT::` runs the tests of one subject.

mod destination_says;
mod happy_path;
mod limits_and_acks;
mod postcopy;
mod replica;
mod table;
mod undecided_postcopy;
