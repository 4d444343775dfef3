//! Mutexes of the engine that no thread may hold during a callback of the VMM.
//!
//! A callback may take as long as a vCPU needs to leave the guest. In postcopy, a vCPU may wait for a page, and
//! the engine needs its own locks to receive that page. A callback under such a lock could therefore wait for
//! itself. In a debug build, [`assert_none_held`] panics if a callback begins on a thread that holds an
//! [`EngineLock`].

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// A mutex that no thread may hold while it calls the VMM.
#[derive(Debug)]
pub struct EngineLock<T> {
    name: &'static str,
    inner: Mutex<T>,
}

impl<T> EngineLock<T> {
    /// Makes a lock; panics of debug builds call it `name`.
    pub const fn new(name: &'static str, value: T) -> Self {
        Self { name, inner: Mutex::new(value) }
    }

    /// Waits for the lock and takes it. A panic does not poison the lock.
    pub fn lock(&self) -> EngineGuard<'_, T> {
        let inner = self.inner.lock();
        EngineGuard { inner, _held: Held::new(self.name) }
    }
}

/// Access to the value of an [`EngineLock`]. Dropping it releases the lock.
#[derive(Debug)]
pub struct EngineGuard<'a, T> {
    inner: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> EngineGuard<'_, T> {
    /// Releases the lock until `condvar` is notified.
    pub fn wait(&mut self, condvar: &Condvar) {
        condvar.wait(&mut self.inner);
    }

    /// Releases the lock until `condvar` is notified, at most for `limit`.
    pub fn wait_for(&mut self, condvar: &Condvar, limit: Duration) {
        condvar.wait_for(&mut self.inner, limit);
    }
}

impl<T> Deref for EngineGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for EngineGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// Checks that this thread holds no [`EngineLock`]. The engine calls it before every callback of the VMM.
///
/// # Panics
/// In a debug build, if this thread holds an [`EngineLock`]; the message names `callback` and the lock.
#[inline]
pub fn assert_none_held(callback: &str) {
    debug::assert_none_held(callback);
}

use debug::Held;

#[cfg(debug_assertions)]
mod debug {
    use std::cell::RefCell;

    thread_local! {
        /// The names of the locks that this thread holds, in the order of locking.
        static HELD: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    /// One entry of `HELD`, removed when dropped.
    #[derive(Debug)]
    pub(super) struct Held(&'static str);

    impl Held {
        pub(super) fn new(name: &'static str) -> Self {
            HELD.with_borrow_mut(|held| held.push(name));
            Self(name)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.with_borrow_mut(|held| {
                // Guards need not be dropped in reverse order.
                if let Some(at) = held.iter().rposition(|name| *name == self.0) {
                    held.remove(at);
                }
            });
        }
    }

    #[track_caller]
    pub(super) fn assert_none_held(callback: &str) {
        let held = HELD.with_borrow(Vec::clone);
        // A second panic would abort the process and hide the first one.
        if !held.is_empty() && !std::thread::panicking() {
            panic!(
                "{callback} was called on a thread that holds the engine's lock {held:?}: the callback may wait for progress that \
                 needs this lock (docs/design/threads.md, Locks)"
            );
        }
    }
}

#[cfg(not(debug_assertions))]
mod debug {
    #[derive(Debug)]
    pub(super) struct Held;

    impl Held {
        #[inline]
        pub(super) fn new(_: &'static str) -> Self {
            Self
        }
    }

    #[inline]
    pub(super) fn assert_none_held(_: &str) {}
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Returns the message of the panic, if `act` panics.
    fn said(act: impl FnOnce()) -> Option<String> {
        let panic = catch_unwind(AssertUnwindSafe(act)).err()?;
        panic.downcast_ref::<String>().cloned()
    }

    #[test]
    #[cfg(debug_assertions)]
    fn callback_under_a_lock_panics_and_names_both() {
        let (first, second) = (EngineLock::new("first", 1), EngineLock::new("second", 2));
        let (ones, twos) = (first.lock(), second.lock());
        // The locks are released in the order in which they were taken.
        drop(ones);

        let text = said(|| assert_none_held("SourceVm::stop")).expect("a panic");

        assert!(text.contains("SourceVm::stop") && text.contains("second"), "{text}");
        assert!(!text.contains("first"), "it is released: {text}");
        drop(twos);
        assert_eq!(said(|| assert_none_held("SourceVm::stop")), None);
    }

    #[test]
    fn callback_beside_the_lock_of_another_thread_is_permitted() {
        let lock = EngineLock::new("custody", ());
        let _held = lock.lock();

        let others = std::thread::scope(|scope| scope.spawn(|| said(|| assert_none_held("Vm::ram"))).join());

        assert_eq!(others.expect("no panic"), None);
    }

    #[test]
    fn value_is_as_it_was_left_after_a_panic_and_a_wait_that_ends() {
        let (lock, condvar) = (EngineLock::new("value", 1), Condvar::new());
        let panicked = said(|| {
            let mut value = lock.lock();
            *value = 2;
            std::panic::panic_any("told to".to_owned());
        });
        assert_eq!(panicked.as_deref(), Some("told to"));
        let mut value = lock.lock();
        value.wait_for(&condvar, Duration::from_millis(1));
        assert_eq!(*value, 2);
        drop(value);
        assert_eq!(said(|| assert_none_held("Vm::ram")), None);
    }
}
