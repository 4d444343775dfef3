//! A protection whose threads have exactly the rules of `sterna::sandbox::TABLE`, at both sides.
//!
//! The recorder, the filters and the VM are those of the engine's tests. The test locks a child process in.

#[path = "../../../sterna-transport/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../sterna/tests/sandbox/checked.rs"]
mod checked;
#[path = "../../../sterna/tests/sandbox/child.rs"]
#[allow(dead_code, reason = "this program uses a part")]
mod child;
#[path = "../../../sterna/tests/common/mod.rs"]
mod common;
#[path = "../../../sterna/tests/sandbox/dirty.rs"]
mod dirty;
#[path = "../../../sterna/tests/sandbox/locked.rs"]
mod locked;
#[path = "../../../sterna/tests/sandbox/recorder.rs"]
mod recorder;
#[path = "../../../sterna/tests/support/mod.rs"]
mod support;
#[path = "../../../sterna/tests/sandbox/vm.rs"]
mod vm;

mod calls;
mod sides;
