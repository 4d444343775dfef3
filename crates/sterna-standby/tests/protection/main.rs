//! The integration tests of this crate, one module per subject. They are one program, so that only one is linked.
//! `cargo test -p sterna-standby --test protection SUBJECT::` runs the tests of one subject. The guests, peers and proxies are those of
//! the engine's tests.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../sterna/tests/common/mod.rs"]
mod common;
#[path = "../../../sterna/tests/plain/mod.rs"]
mod plain;
#[path = "../../../sterna/tests/support/mod.rs"]
mod support;

mod contact;
mod pairs;
mod protected;
mod protected_streams;
mod replica;
