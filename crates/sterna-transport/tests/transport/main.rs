//! The integration tests of this crate, one module per subject, linked into one program.
//!
//! `cargo test -p sterna-transport --test transport SUBJECT::` runs those of one subject. `staging_removed` is a program
//! of its own, because it removes the files of the whole process.

#[path = "../support/certificates.rs"]
mod certificates;

mod channel;
mod listener;
mod page_file;
mod piece;
mod rdma;
mod tls;
