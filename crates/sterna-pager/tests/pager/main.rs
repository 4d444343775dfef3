//! Guests in other processes, with real userfaultfds, are served out of memory images.

mod cloud_hypervisor;
mod common;
mod ends;
mod fill;
mod handshakes;
mod images;
mod operations;
mod own;
mod pages;

/// The other process: [`common::guest`] starts this program again with this test alone.
#[test]
#[ignore = "it is the guest of other tests"]
fn guest_process() {
    sterna_uffd_peer::child();
}
