//! A guest whose memory is filled while it runs, in a process whose threads have exactly the rules of `sterna::sandbox::TABLE`.
//!
//! The recorder and the filters are those of the engine's tests. The test locks a child process in.

#[path = "../../../sterna/tests/sandbox/checked.rs"]
mod checked;
#[path = "../../../sterna/tests/sandbox/child.rs"]
#[allow(dead_code, reason = "this program uses a part")]
mod child;
#[path = "../../../sterna/tests/sandbox/locked.rs"]
mod locked;
#[path = "../../../sterna/tests/sandbox/recorder.rs"]
mod recorder;

mod calls;
