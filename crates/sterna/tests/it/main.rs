//! The integration tests of this crate, one module for each subject: one program is linked, not one for each file.
//! `cargo test -p sterna --test it SUBJECT::` runs those of one subject.
//! Tests that count what the process holds are in `cases`, those that measure its memory in `sparse`.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../plain/mod.rs"]
mod plain;
#[path = "../support/mod.rs"]
mod support;

mod delay;

mod contact;
mod dirty_rate;
mod external_memory;
mod free_page_hints;
mod migrate;
mod opaque;
mod page_order;
mod pairs;
mod poisoned;
mod postcopy;
mod postcopy_live;
mod protected;
mod protected_streams;
mod rdma_destination;
mod rdma_lanes;
mod rdma_migrate;
mod rdma_source;
mod rdma_stream;
mod reconnect;
mod replica;
mod same_host;
mod save;
mod stale;
mod tls;
