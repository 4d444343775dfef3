//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-qmp --test it SUBJECT::` runs those of one subject.

// One table of parameters is one `json!`.
#![recursion_limit = "256"]

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;

mod drive;
mod drive_rdma;
mod monitor;
mod standby;
