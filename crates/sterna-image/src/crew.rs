//! Runs one piece of work on several threads.

use std::panic::resume_unwind;
use std::thread::{self, Builder};

/// Runs `work` on `threads` threads, including the calling thread, and returns the first error.
///
/// If the host refuses a thread, for example because of the user's limit, fewer threads run.
pub(crate) fn share<E: Send>(threads: usize, work: impl Fn() -> Result<(), E> + Sync) -> Result<(), E> {
    thread::scope(|scope| {
        let spawn = |_| Builder::new().spawn_scoped(scope, &work).ok();
        let others: Vec<_> = (1..threads).map_while(spawn).collect();
        let done = work();
        others.into_iter().fold(done, |done, other| {
            let other = other.join().unwrap_or_else(|panic| resume_unwind(panic));
            done.and(other)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn work_runs_on_each_thread_and_the_error_of_any_is_given() {
        let runs = AtomicUsize::new(0);
        let work = || {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            if run == 2 { Err("the third") } else { Ok(()) }
        };

        assert_eq!(share(0, work), Ok(()), "the calling thread works");
        assert_eq!(share(4, work), Err("the third"));
        assert_eq!(runs.load(Ordering::SeqCst), 5);
    }
}
