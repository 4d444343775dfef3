//! Distributes work to threads.

use std::panic::resume_unwind;
use std::thread::{self, Builder};

use parking_lot::Mutex;

use crate::threads::{FirstCall, ThreadRole};

/// Calls `work` for every part, on this thread and on helpers.
///
/// At most `threads` threads work in all, and fewer if the system refuses threads. Each thread takes the next
/// part when it has finished one, so a late helper delays no other thread. The results are in no particular
/// order.
///
/// # Panics
/// If `work`, or the hook of a helper ([`crate::threads`]), panics.
pub(crate) fn share<P: Send, R: Send>(
    threads: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(P) -> R + Sync,
) -> Vec<R> {
    share_by(|number| ThreadRole::MergeDirty.of(number).prepare(), threads, parts, work)
}

/// Distributes the work with a builder of helpers that tests can replace.
fn share_by<P: Send, R: Send>(
    helper: impl Fn(usize) -> (Builder, FirstCall),
    threads: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(P) -> R + Sync,
) -> Vec<R> {
    let parts = Mutex::new(parts);
    // Only the iterator's own code runs under the lock.
    let next = || parts.lock().next();
    let run = || -> Vec<R> { std::iter::from_fn(next).map(&work).collect() };
    thread::scope(|scope| {
        // If no helper starts, this thread does all the work.
        let start = |number| {
            let (builder, first) = helper(number);
            let work = move || {
                first.call();
                run()
            };
            builder.spawn_scoped(scope, work).ok()
        };
        let helpers: Vec<_> = (1..threads).map_while(start).collect();
        let mut all = run();
        for helper in helpers {
            // After a panic the bits of a part are missing, so the caller must not continue.
            all.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn share_does_every_part_once() {
        for threads in [1, 2, 5] {
            let mut done = share(threads, 0..100, |part| part * part);
            done.sort_unstable();
            assert_eq!(done, (0..100).map(|part| part * part).collect::<Vec<_>>());
        }
    }

    #[test]
    fn share_without_helpers_is_done_by_this_thread() {
        // No system can allocate such a stack.
        let none = |number| {
            let (builder, first) = ThreadRole::MergeDirty.of(number).prepare();
            (builder.stack_size(1 << 60), first)
        };
        assert!(none(1).0.spawn(|| ()).is_err());
        let here = thread::current().id();

        let done = share_by(none, 4, 0..3, |part| (part, thread::current().id()));

        assert_eq!(done, [(0, here), (1, here), (2, here)]);
    }

    #[test]
    fn share_whose_helper_panics_panics() {
        // Both threads get a part, and the helper's part panics.
        let (here, both) = (thread::current().id(), Barrier::new(2));
        let work = |_part: u32| {
            both.wait();
            assert!(thread::current().id() == here, "a helper's bug");
        };

        let panic = catch_unwind(AssertUnwindSafe(|| share(2, 0..2, work))).unwrap_err();

        assert!(panic.downcast_ref::<&str>().is_some_and(|text| text.contains("a helper's bug")));
    }
}
