//! The system calls of the engine, as data for the sandbox of a VMM.
//!
//! [`TABLE`] has a line for each call: which threads make it, for which feature, and when. [`rules`] selects the lines that
//! one thread needs. The module installs nothing and knows no library for seccomp. `docs/sandboxes.md` shows the table,
//! and a VMM that uses it with `seccompiler`.
//!
//! A thread inherits the filters of the thread that starts it, and can only add to them. Therefore the rules of a thread
//! contain the rules of all threads that it starts.
//!
//! The table was made with glibc on x86-64. It has no calls of your callbacks: add the calls of your devices, hooks and
//! observers to the threads that call them (`docs/embedding.md`, "Callbacks: thread and cost").
//!
//! ```
//! use sterna::ThreadRole;
//! use sterna::sandbox::{Feature, Thread, rules};
//!
//! let features = [Feature::Sockets, Feature::Tcp, Feature::Multifd];
//! for call in rules(&features, Thread::Engine(ThreadRole::Lane)) {
//!     println!("{} (number {}): {:?}", call.name, call.number, call.argument);
//! }
//! ```

mod table;
mod threads;
mod types;

pub use table::TABLE;
pub use threads::started_by;
pub use types::{Argument, Feature, Syscall, Thread, When};

/// Returns the lines that a thread needs if these features are used, in the order of the table.
///
/// They include the calls of all threads that the thread starts, directly or indirectly.
/// [`Feature::Runtime`] and [`Feature::Always`] need not be named.
pub fn rules(features: &[Feature], thread: Thread) -> Vec<&'static Syscall> {
    let threads = with_descendants(thread);
    let is_used =
        |feature| matches!(feature, Feature::Runtime | Feature::Always) || features.contains(&feature);
    TABLE
        .iter()
        .filter(|call| is_used(call.feature) && threads.iter().any(|thread| call.is_made_by(*thread)))
        .collect()
}

fn with_descendants(thread: Thread) -> Vec<Thread> {
    let mut threads = vec![thread];
    let mut next = 0;
    while next < threads.len() {
        let parent = threads[next];
        for child in started_by(parent).iter().map(|role| Thread::Engine(*role)) {
            if !threads.contains(&child) {
                threads.push(child);
            }
        }
        next += 1;
    }
    threads
}

#[cfg(test)]
mod tests {
    use sterna_ram::threads::ThreadRole;

    use super::*;

    #[test]
    fn thread_may_make_every_call_of_the_threads_that_it_starts() {
        let names = |thread| -> Vec<_> {
            rules(&[Feature::Sockets, Feature::Tcp], thread).into_iter().map(|call| call.name).collect()
        };
        let lane = names(Thread::Engine(ThreadRole::Lane));
        let control = names(Thread::Engine(ThreadRole::Migration));

        assert!(lane.iter().all(|name| control.contains(name)), "{lane:?} {control:?}");
        assert!(control.contains(&"connect") && !lane.contains(&"connect"));
    }

    #[test]
    fn feature_that_is_not_used_adds_no_call() {
        let caller = Thread::DestinationCaller;

        assert!(!rules(&[Feature::Sockets], caller).iter().any(|call| call.name == "userfaultfd"));
        assert!(rules(&[Feature::Postcopy], caller).iter().any(|call| call.name == "userfaultfd"));
    }

    #[test]
    fn table_has_each_line_once() {
        for (index, line) in TABLE.iter().enumerate() {
            let same = |other: &&Syscall| {
                (other.number, other.argument, other.feature, other.when)
                    == (line.number, line.argument, line.feature, line.when)
            };
            assert_eq!(TABLE[index..].iter().filter(same).count(), 1, "{line:?}");
        }
    }
}
