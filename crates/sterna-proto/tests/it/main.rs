//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-proto --test it SUBJECT::` runs those of one subject.

mod destination_says;
mod happy_path;
mod limits_and_acks;
mod postcopy;
mod replica;
mod table;
