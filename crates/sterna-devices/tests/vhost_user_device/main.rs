//! The vhost-user front end with a back end of our own in another process.

#[path = "../support/back_end.rs"]
mod back_end;
mod carrying;
mod faults;
mod half;
mod logging;
mod machine;
mod migrating;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/virtqueue.rs"]
mod virtqueue;

/// Not a test by itself: the other tests call this program again to be their back end.
#[test]
fn back_end_runs_for_another_test() {
    back_end::run_if_asked();
}
