//! What a process must remove if it ends before an image is complete.
//!
//! A drop removes it. A process that ends at a signal drops nothing, and calls [`remove_unfinished`].

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

type Undo = Box<dyn Fn() + Send>;

static UNFINISHED: Mutex<Vec<(u64, Undo)>> = Mutex::new(Vec::new());

/// An entry in the list of unfinished things. Dropping it removes the entry, and does nothing else.
#[derive(Debug)]
pub struct Unfinished(u64);

impl Unfinished {
    /// Adds an entry. `undo` removes the unfinished thing: a file, a lease, an upload.
    #[must_use = "the entry is removed when it is dropped"]
    pub fn new(undo: impl Fn() + Send + 'static) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        UNFINISHED.lock().push((number, Box::new(undo)));
        Self(number)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        UNFINISHED.lock().retain(|(number, _)| *number != self.0);
    }
}

/// Removes the unfinished files, leases and uploads of this process, the newest first. Then the process must end.
///
/// Requests to an object storage have their own limits of time.
pub fn remove_unfinished() {
    let list = std::mem::take(&mut *UNFINISHED.lock());
    for (_, undo) in list.iter().rev() {
        undo();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// One test, because the list belongs to the process.
    #[test]
    fn what_is_unfinished_is_undone_once_and_what_was_dropped_is_not() {
        let count = Arc::new(AtomicU64::new(0));
        let add = |amount: u64| {
            let count = Arc::clone(&count);
            Unfinished::new(move || {
                count.fetch_add(amount, Ordering::Relaxed);
            })
        };
        let (finished, left) = (add(1), add(10));
        drop(finished);
        remove_unfinished();
        remove_unfinished();
        drop(left);
        assert_eq!(count.load(Ordering::Relaxed), 10);
    }
}
