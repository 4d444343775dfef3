//! Cleanup when this process aborts. A Rust program aborts when a memory allocation fails.

use std::sync::OnceLock;

use super::staging;

/// The last line that this process prints.
static MESSAGE: OnceLock<&'static str> = OnceLock::new();

/// Installs a handler of SIGABRT that removes this process's staging files.
///
/// The handler writes `message` to standard error and ends the process with status 1 instead of SIGABRT. Only the
/// first call has an effect.
pub(super) fn clean_up(message: &'static str) {
    if MESSAGE.set(message).is_err() {
        return;
    }
    // SAFETY: the handler has the type that the call expects, and calls only functions that a handler may call.
    unsafe { libc::signal(libc::SIGABRT, on_abort as *const () as libc::sighandler_t) };
}

extern "C" fn on_abort(_: libc::c_int) {
    staging::remove_all_in_handler();
    let message = MESSAGE.get().copied().unwrap_or_default();
    // SAFETY: both functions are async-signal-safe (signal-safety(7)). The message is static.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(1);
    }
}
