//! Loom's atomics in place of `sterna-ram`'s. They are larger than eight bytes, so words are copied.

pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

pub(crate) fn with_words<T>(words: &mut [AtomicU64], work: impl FnOnce(&mut [u64]) -> T) -> T {
    let mut copy: Vec<u64> = words.iter().map(|word| word.load(Ordering::Acquire)).collect();
    let result = work(&mut copy);
    for (word, new) in words.iter().zip(copy) {
        word.store(new, Ordering::Release);
    }
    result
}
