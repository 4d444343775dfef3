//! The integration tests of this crate: one module per subject, all linked into one program.
//!
//! `cargo test -p sterna-ram --test memory SUBJECT::` runs the tests of one subject. `testing/loom` explores the
//! schedules of the bitmaps with loom.

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
mod space;
mod vhost;
mod vmm_logs;
mod write_protection;
mod zero;
