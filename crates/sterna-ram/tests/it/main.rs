//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-ram --test it SUBJECT::` runs those of one subject.
//! `loom` is built with another configuration, so it is a program of its own.

#[path = "../support/broken.rs"]
mod broken;
#[path = "../support/mapped.rs"]
mod mapped;
#[path = "../support/mod.rs"]
mod support;

mod bitmap;
mod block;
mod descriptors;
mod dirty;
mod external;
mod fork;
mod kvm;
mod merge;
mod missing_pages;
mod pinned;
mod poison;
mod ring;
mod slots;
mod vhost;
mod vmm_logs;
mod write_protection;
mod zero;
