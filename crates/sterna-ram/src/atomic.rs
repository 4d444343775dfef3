//! The atomic words of bitmaps and logs.
//!
//! `testing/loom` compiles the files that use them with loom's atomics instead, which explore every schedule.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// Returns zero words. The kernel allocates their memory on the first write.
///
/// This matters because a peer may name a block of many TiB of which no page ever arrives.
pub(crate) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    const { assert!(align_of::<u64>() == align_of::<AtomicU64>()) };
    let words = Box::into_raw(vec![0u64; words].into_boxed_slice());
    // SAFETY: the pointer comes from a box and is used once. `AtomicU64` has the size and the valid values of
    // `u64`, and its alignment as asserted above. The box is therefore freed with the layout of its allocation.
    unsafe { Box::from_raw(words as *mut [AtomicU64]) }
}

/// Calls `work` with the words as plain integers.
pub(crate) fn with_words<T>(words: &mut [AtomicU64], work: impl FnOnce(&mut [u64]) -> T) -> T {
    let words: *mut [AtomicU64] = &raw mut *words;
    // SAFETY: an AtomicU64 has the size, the alignment and the valid values of a u64. `words` is borrowed
    // exclusively while the slice lives, so no other code reads or writes the words.
    work(unsafe { &mut *(words as *mut [u64]) })
}
