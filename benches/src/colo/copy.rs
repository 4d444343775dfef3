//! The lower limit of a pause in which pages are copied: a plain copy of the same number of pages.

use std::time::{Duration, Instant};

const PAGE_SIZE: usize = 4096;
/// From this number of pages on, a further thread is worth its start. The engine uses the same number.
const PAGES_PER_THREAD: u64 = 1024;
const ROUNDS: usize = 15;

/// Median time to copy `pages` pages that are not adjacent.
pub(crate) fn median(pages: u64) -> Duration {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = (pages / PAGES_PER_THREAD).clamp(1, processors) as usize;
    let length = (pages as usize).max(1) * PAGE_SIZE;
    let from = vec![1_u8; 2 * length];
    let mut to = vec![2_u8; length];
    let mut times: Vec<Duration> = (0..ROUNDS).map(|_| copy(&from, &mut to, threads)).collect();
    times.sort_unstable();
    times[ROUNDS / 2]
}

/// Copies every second page of `from`.
fn copy(from: &[u8], to: &mut [u8], threads: usize) -> Duration {
    let share = (to.len() / PAGE_SIZE).div_ceil(threads) * PAGE_SIZE;
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(2 * share).zip(to.chunks_mut(share)) {
            let copy = move || {
                for (from, to) in from.chunks(2 * PAGE_SIZE).zip(to.chunks_mut(PAGE_SIZE)) {
                    to.copy_from_slice(&from[..PAGE_SIZE]);
                }
            };
            scope.spawn(copy);
        }
    });
    let took = began.elapsed();
    std::hint::black_box(to);
    took
}
