//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-devices --test it SUBJECT::` runs those of one subject.
//! `vhost_user_device_leaks` counts descriptors, so it is a program of its own.

#[path = "../support/back_end.rs"]
mod back_end;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/virtqueue.rs"]
mod virtqueue;

mod vfio_user;
mod vhost_user_device;

/// Not a test by itself: the other tests call this program again to be their back end.
#[test]
fn back_end_runs_for_another_test() {
    back_end::run_if_asked();
}
