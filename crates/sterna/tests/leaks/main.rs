//! Tests which prove that a migration leaves no descriptor and no thread behind. They count the descriptors and
//! threads of the process. Therefore each test runs inside `support::case`, alone in the process. A test that does
//! not belongs into `engine`. `cargo test -p sterna --test leaks SUBJECT::` runs the tests of one subject.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../support/mod.rs"]
mod support;

mod cancel;
mod configuration;
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
mod threads;
mod tls;
mod undecided;
