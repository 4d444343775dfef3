//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-transport --test it SUBJECT::` runs those of one subject.
//! `staging_removed` removes the files of the whole process, so it is a program of its own.

#[path = "../support/certificates.rs"]
mod certificates;

mod channel;
mod listener;
mod page_file;
mod piece;
mod rdma;
mod tls;
