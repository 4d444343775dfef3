//! The crate against a small daemon that refuses what libvirt 12.8 refuses (specs/libvirt-rpc.md §3).
#![allow(missing_docs)]

mod calls;
mod daemon;
mod doors;
mod qemu;
mod refusals;
mod virsh;

use daemon::Daemon;

/// The fake daemon keeps the same rules as the real one, for which `libvirt_domains` of sterna-interop runs the same table.
#[test]
fn daemon_of_these_tests_refuses_what_libvirt_refuses() {
    let daemon = Daemon::start(|_| {});

    refusals::check(&daemon.socket()).unwrap();
}
