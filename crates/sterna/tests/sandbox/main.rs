//! The engine inside of sandboxes: Landlock, a chroot without `/proc`, a user without rights, seccomp.
//!
//! `cargo test -p sterna --test sandbox SUBJECT::` runs the tests of one subject. Each test locks a child process in.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../support/mod.rs"]
mod support;

mod calls;
mod checked;
mod child;
mod dirty;
mod huge;
mod live;
mod locked;
mod page;
mod paths;
mod rdma;
mod recorder;
mod scenes;
mod vm;
