//! Threads that Sterna starts: their roles, their names, and the VMM's hook that runs first on each.
//!
//! A thread passes its hook on to every thread that it starts with [`NewThread`]. A VMM's thread has no hook, so a
//! function that a VMM calls and that may start threads runs under [`hooked`]. The module is in this crate because it
//! is the lowest one that starts threads.

mod role;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::RefCell;
use std::fmt::Display;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

pub use role::ThreadRole;

/// A VMM's hook: the first call on each thread that Sterna starts, on that thread.
///
/// A panic of the hook is the error of the work for which the thread was started. The work then does not begin.
pub type OnThreadStart = Arc<dyn Fn(ThreadRole) + Send + Sync>;

thread_local! {
    static HOOK: RefCell<Option<OnThreadStart>> = const { RefCell::new(None) };
}

/// Runs `act`; threads that this thread starts meanwhile have `hook`. The hook of before is set again at the end.
pub fn hooked<T>(hook: Option<&OnThreadStart>, act: impl FnOnce() -> T) -> T {
    struct Before(Option<OnThreadStart>);
    impl Drop for Before {
        fn drop(&mut self) {
            HOOK.set(self.0.take());
        }
    }
    let _before = Before(HOOK.replace(hook.cloned()));
    act()
}

/// The hook of threads that this thread starts.
pub fn hook() -> Option<OnThreadStart> {
    HOOK.with_borrow(Clone::clone)
}

/// The payload of the panic that ends a thread whose hook panicked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("Parameters::on_thread_start panicked on the new thread {thread:?}: {message}")]
pub struct HookPanicked {
    /// The thread's name.
    pub thread: String,
    /// The panic's message.
    pub message: String,
}

/// The message of a panic, if it has one.
pub fn message_of(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    message.unwrap_or_else(|| "(no message)".to_owned())
}

/// A thread that is about to be started.
#[derive(Debug, Clone)]
pub struct NewThread {
    role: ThreadRole,
    name: String,
}

impl From<ThreadRole> for NewThread {
    fn from(role: ThreadRole) -> Self {
        Self { role, name: role.name().to_owned() }
    }
}

impl NewThread {
    /// The thread's name: its role, and its number or device if there are several.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The builder of the thread, and the call that must come first on it.
    pub fn prepare(self) -> (Builder, FirstCall) {
        let builder = Builder::new().name(self.name.clone());
        (builder, FirstCall { thread: self, hook: hook() })
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// The operating system cannot create the thread.
    pub fn spawn<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let (builder, first) = self.prepare();
        // Boxed, so that the standard library's part is compiled once for each type of result.
        let work: Box<dyn FnOnce() -> T + Send> = Box::new(work);
        builder.spawn(move || {
            first.call();
            work()
        })
    }

    /// Starts the thread in a scope. A caller that does not join it loses the reason of a hook's panic.
    ///
    /// # Errors
    /// The operating system cannot create the thread.
    pub fn spawn_scoped<'scope, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        let (builder, first) = self.prepare();
        let work: Box<dyn FnOnce() -> T + Send + 'scope> = Box::new(work);
        builder.spawn_scoped(scope, move || {
            first.call();
            work()
        })
    }
}

/// Runs the hook on a new thread.
pub struct FirstCall {
    thread: NewThread,
    hook: Option<OnThreadStart>,
}

impl FirstCall {
    /// Calls the hook, and gives it to this thread for the threads that it starts.
    ///
    /// # Panics
    /// With [`HookPanicked`] if the hook panics.
    pub fn call(self) {
        let Some(hook) = self.hook else { return };
        HOOK.set(Some(Arc::clone(&hook)));
        let called = catch_unwind(AssertUnwindSafe(|| hook(self.thread.role)));
        if let Err(panic) = called {
            let message = message_of(&*panic);
            resume_unwind(Box::new(HookPanicked { thread: self.thread.name, message }));
        }
    }
}

impl ThreadRole {
    /// A thread of this role, if there are several: `lane 3`.
    pub fn of(self, which: impl Display) -> NewThread {
        NewThread { role: self, name: format!("{} {which}", self.name()) }
    }
}
