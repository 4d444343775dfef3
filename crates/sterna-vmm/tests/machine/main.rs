//! The integration tests of this crate, one module per subject, linked into one program. `cargo test -p
//! sterna-vmm --test machine SUBJECT::` runs the tests of one subject.

#[path = "../../../sterna-devices/tests/support/back_end.rs"]
mod back_end;
#[path = "../../../sterna-ram/tests/support/broken.rs"]
mod broken;
#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../sterna-devices/tests/support/model.rs"]
mod model;
#[path = "../../../sterna/tests/plain/mod.rs"]
mod plain;
#[path = "../support/registers.rs"]
mod registers;
#[path = "../../../sterna-devices/tests/support/virtqueue.rs"]
mod virtqueue;

mod hostile;
mod inherited;
mod machine;
mod memory_failure;
mod moving;
mod of_0_1;
mod qcow2;
mod ring;
mod vfio_user;
mod vhost_user_guest;
mod vhost_user_machine;
mod virtio;

/// Not a test of its own. Other tests start this program again as their back end.
#[test]
fn back_end_runs_for_another_test() {
    back_end::run_if_asked();
}
