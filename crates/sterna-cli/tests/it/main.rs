//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna-cli --test it SUBJECT::` runs those of one subject.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../support/mod.rs"]
mod support;

mod convert;
mod demo;
mod dirty_limit;
mod exit_statuses;
mod peer;
mod postcopy;
mod postcopy_devices;
mod protect;
mod protect_devices;
mod rdma;
mod reconnect;
mod same_host;
mod same_host_devices;
mod save;
mod standby;
mod vfio_user;
mod vhost_user;
