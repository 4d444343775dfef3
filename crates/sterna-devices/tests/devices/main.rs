//! The integration tests of this crate, one module per subject, linked into one program. `cargo test -p
//! sterna-devices --test devices SUBJECT::` runs the tests of one subject. `vhost_user_device_leaks` is a separate
//! program, because it counts descriptors.

#[path = "../support/back_end.rs"]
mod back_end;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/virtqueue.rs"]
mod virtqueue;

mod vfio_user;
mod vhost_user_device;

/// Not a test of its own. Other tests start this program again as their back end.
#[test]
fn back_end_runs_for_another_test() {
    back_end::run_if_asked();
}
