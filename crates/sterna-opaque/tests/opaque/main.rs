//! The integration tests of this crate, one module per subject. They are one program, so that only one is linked.
//! `cargo test -p sterna-opaque --test opaque SUBJECT::` runs the tests of one subject. The test of `memory` measures the memory
//! of its process. The guests, peers and proxies are those of
//! the engine's tests.

#[path = "../../../sterna/tests/common/mod.rs"]
mod common;
#[path = "../../../sterna/tests/support/mod.rs"]
mod support;

mod opaque;
mod serve;
