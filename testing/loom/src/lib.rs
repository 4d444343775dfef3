//! The files of `sterna-ram` that take bits while other threads set them, compiled with loom's atomics.
#![allow(dead_code, unused_imports, reason = "the tests use a part of the included files")]

mod atomic;
#[path = "../../../crates/sterna-ram/src/bitmap/mod.rs"]
mod bitmap;
#[path = "../../../crates/sterna-ram/src/dirty/vhost/drain.rs"]
mod drain;
#[path = "../../../crates/sterna-ram/src/merge/mod.rs"]
mod merge;

pub use bitmap::{PageBitmap, Run};

/// Takes all bits of `log`: the index and the bits of each word that had any.
pub fn drain_words(log: &[loom::sync::atomic::AtomicU64]) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    drain::drain_words(log, 0, &mut found);
    found
}
