//! Calls of the program's functions, and how they report failures.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use sterna::VmError;

use crate::boundary::{Done, text};
use crate::error::{Failure, STERNA_ERROR_STATE};

/// A callback that may fail: 0 for success. Its text is set with sterna_failure_set.
pub type sterna_step = Option<unsafe extern "C" fn(user: *mut c_void, failure: *mut sterna_failure) -> i32>;
/// A callback without a result.
pub type sterna_notice = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A callback's report of why it fails. It is valid until the callback returns.
pub struct sterna_failure {
    text: Option<String>,
}

/// Sets the text of a callback's failure. The callback then returns a value other than 0. The text is copied.
///
/// Threads: the callback's, before it returns.
/// `failure` is the callback's argument. `message` is NULL or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_failure_set(failure: *mut sterna_failure, message: *const c_char) {
    // SAFETY: as the contract says.
    if let (Some(failure), Ok(message)) = (unsafe { failure.as_mut() }, unsafe { text(message, "message") }) {
        failure.text = Some(message.to_owned());
    }
}

/// Receives the bytes that a callback writes: a device's state, or a configuration. Valid until the callback returns.
pub struct sterna_state(pub(crate) Vec<u8>);

/// Appends `length` bytes to the state. They are copied. May be called several times.
///
/// Threads: the callback's, before it returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_state_write(state: *mut sterna_state, bytes: *const c_void, length: usize) {
    // SAFETY: `state` is the argument of the callback.
    if let Some(state) = unsafe { state.as_mut() }
        && !bytes.is_null()
    {
        // SAFETY: the caller gives `length` readable bytes.
        state.0.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.cast(), length) });
    }
}

/// A pointer of the program that is passed to its callbacks.
#[derive(Clone, Copy)]
pub(crate) struct User(pub(crate) *mut c_void);

// SAFETY: the library never reads it. The program's callbacks may be called on any thread, by their contract.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

/// A pointer with the callback that ends its use, which is called when the last clone of an `Arc` of it is dropped.
pub(crate) struct Owned {
    user: User,
    destroy: sterna_notice,
    /// Whether the library has taken the pointer over: only then does it end its use.
    is_taken: AtomicBool,
}

impl Owned {
    /// A pointer that the library takes over.
    pub(crate) fn new(user: *mut c_void, destroy: sterna_notice) -> Self {
        Self { user: User(user), destroy, is_taken: true.into() }
    }

    /// A pointer that the library takes over with [`Owned::take`], after the call that brought it has succeeded.
    pub(crate) fn offered(user: *mut c_void, destroy: sterna_notice) -> Self {
        Self { user: User(user), destroy, is_taken: false.into() }
    }

    /// The pointer. A closure that calls this method keeps the whole object, and not only a copy of the pointer.
    pub(crate) fn pointer(&self) -> *mut c_void {
        self.user.0
    }

    pub(crate) fn take(&self) {
        self.is_taken.store(true, Ordering::Release);
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.is_taken.load(Ordering::Acquire) {
            // SAFETY: the program gave both, and nothing of the library uses the pointer after this call.
            unsafe { notify(self.destroy, self.user) };
        }
    }
}

/// Calls a callback that may fail. NULL succeeds.
///
/// # Safety
/// The program has given `step` for `user`, which is not destroyed.
pub(crate) unsafe fn run(what: &str, step: sterna_step, user: User) -> Result<(), VmError> {
    let Some(step) = step else { return Ok(()) };
    // SAFETY: as the contract says.
    attempt(what, |failure| unsafe { step(user.0, failure) })
}

/// Calls a callback without a result. NULL does nothing.
///
/// # Safety
/// The program has given `notice` for `user`, which is not destroyed.
pub(crate) unsafe fn notify(notice: sterna_notice, user: User) {
    if let Some(notice) = notice {
        // SAFETY: as the contract says.
        inside(|| unsafe { notice(user.0) });
    }
}

/// Calls a callback that may fail, with a place for its text.
pub(crate) fn attempt(what: &str, call: impl FnOnce(*mut sterna_failure) -> i32) -> Result<(), VmError> {
    let mut failure = sterna_failure::new();
    let code = inside(|| call(&raw mut failure));
    failure.result(what, code)
}

/// Runs a callback, so that calls that would wait for its end are refused.
pub(crate) fn inside<T>(callback: impl FnOnce() -> T) -> T {
    DEPTH.set(DEPTH.get() + 1);
    // No unwinding: a callback is `extern "C"`.
    let result = callback();
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// Whether this thread is in a callback.
pub(crate) fn is_inside() -> bool {
    DEPTH.get() > 0
}

/// Refuses a call that waits, in a callback: the callback would wait for itself.
pub(crate) fn may_wait(function: &str) -> Done {
    if is_inside() {
        let text = format!("{function} waits, so a callback must not call it: call it on another thread");
        return Err(Failure::new(STERNA_ERROR_STATE, text));
    }
    Ok(())
}

impl sterna_failure {
    pub(crate) fn new() -> Self {
        Self { text: None }
    }

    /// The result of the callback `what`, which returned `code`.
    pub(crate) fn result(self, what: &str, code: i32) -> Result<(), VmError> {
        match (code, self.text) {
            (0, _) => Ok(()),
            (_, Some(text)) => Err(VmError::new(what, text)),
            (code, None) => Err(VmError::new(what, format!("the callback returned {code} without a text"))),
        }
    }
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}
