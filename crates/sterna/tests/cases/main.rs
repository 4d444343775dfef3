//! Tests that prove that nothing is left behind: no descriptor, no thread. They count what the process holds, so
//! each works inside `support::case`, alone in the process, and no test that does otherwise may be here: it
//! belongs into `it`. `cargo test -p sterna --test cases SUBJECT::` runs those of one subject.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../support/mod.rs"]
mod support;

mod cancel;
mod convergence;
mod custody;
mod endings;
mod hooks;
mod machines;
mod of_0_1;
mod operator;
mod panics;
mod peer_answers;
mod peer_bytes;
mod peer_connections;
mod peer_cut;
mod peer_qemu;
mod peer_silent;
mod streams;
mod streams_file;
mod switchover_ack;
mod tls;
mod undecided;
