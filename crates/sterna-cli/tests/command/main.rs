//! The integration tests of this crate, one module per subject.
//! They are one program, so that only one is linked. `cargo test -p sterna-cli --test command SUBJECT::` runs the
//! tests of one subject.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../sterna-s3/tests/s3/server.rs"]
#[expect(dead_code, reason = "other tests of this server need the rest")]
mod s3_server;
#[path = "../support/mod.rs"]
mod support;

mod cloud_hypervisor;
mod convert;
mod demo;
mod dirty_limit;
mod exit_statuses;
mod exposition;
mod interrupted;
mod lazy_saves;
mod limits;
mod live;
mod migrate_settings;
mod object_storage;
mod peer;
mod postcopy;
mod postcopy_devices;
mod protect;
mod protect_devices;
mod qmp_reference;
mod rdma;
mod reconnect;
mod relay;
mod run_restore;
mod same_host;
mod same_host_devices;
mod save;
mod serve_uffd;
mod standby;
mod store;
mod vfio_user;
mod vhost_user;
