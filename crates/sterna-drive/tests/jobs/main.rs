//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-drive --test jobs SUBJECT::` runs those of one subject.

mod drive;
mod drive_rdma;
mod drive_settings;
