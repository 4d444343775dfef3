//! The integration tests of this crate, one module per subject. They are one program, so that only one is linked.
//! `cargo test -p sterna --test engine SUBJECT::` runs the tests of one subject. Tests that count the process's
//! descriptors and threads are in `leaks`, tests that measure its memory in `sparse`.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../plain/mod.rs"]
mod plain;
#[path = "../support/mod.rs"]
mod support;

mod configuration;
mod delay;

mod dirty_rate;
mod event_loop;
mod external_memory;
mod first_vmm;
mod free_page_hints;
mod guide;
mod handed;
mod handover;
mod last_sync;
mod live_save;
mod migrate;
mod ownership;
mod page_order;
mod pairs;
mod poisoned;
mod postcopy_live;
mod rdma_destination;
mod rdma_lanes;
mod rdma_migrate;
mod rdma_source;
mod rdma_stream;
mod reconnect;
mod same_host;
mod save;
mod stale;
mod tls;
mod whole_memory;
