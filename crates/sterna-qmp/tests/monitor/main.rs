//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-qmp --test monitor SUBJECT::` runs those of one subject.

// The table of parameters is a single large `json!`, which needs deep macro recursion.
#![recursion_limit = "256"]

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;

mod monitor;
mod standby;
