//! Error codes and error objects.

use std::any::Any;
use std::ffi::{CString, c_char};

use sterna::{Fault, MigrationError};

use crate::text::new_text;

/// The call succeeded.
pub const STERNA_OK: i32 = 0;
/// A pointer is NULL that must not be.
pub const STERNA_ERROR_NULL: i32 = 1;
/// An argument is malformed: an address, a memory block, a text that is not UTF-8, the size of a structure.
pub const STERNA_ERROR_ARGUMENT: i32 = 2;
/// There is no parameter or capability of this name, or it has no effect in this library.
pub const STERNA_ERROR_NAME: i32 = 3;
/// A setting is out of range, or settings exclude each other.
pub const STERNA_ERROR_SETTINGS: i32 = 4;
/// The call is not possible now: the text names the state, and what to do.
pub const STERNA_ERROR_STATE: i32 = 5;
/// The operating system refused a resource.
pub const STERNA_ERROR_SYSTEM: i32 = 6;
/// The certificates cannot be used.
pub const STERNA_ERROR_CREDENTIALS: i32 = 7;
/// The time-out passed. The migration continues.
pub const STERNA_ERROR_TIMED_OUT: i32 = 8;
/// The time-out passed, and the migration is undecided: its destination may run the guest. See
/// sterna_migration_decide.
pub const STERNA_ERROR_UNDECIDED: i32 = 9;
/// The migration was cancelled. The guest is at the source, as before.
pub const STERNA_ERROR_CANCELLED: i32 = 10;
/// The migration failed. At the source: the guest is here, as before. At the destination: no guest is here.
pub const STERNA_ERROR_FAILED: i32 = 11;
/// The migration failed, and the guest could not be resumed at the source. See sterna_migration_retry.
pub const STERNA_ERROR_HELD: i32 = 12;
/// A defect of this library. Please report the text.
pub const STERNA_ERROR_INTERNAL: i32 = 13;

/// The fault of no known side, for example of a network that was cut.
pub const STERNA_FAULT_NONE: i32 = 0;
/// This side has to change something.
pub const STERNA_FAULT_LOCAL: i32 = 1;
/// The two sides are set up differently.
pub const STERNA_FAULT_PEER_INCOMPATIBLE: i32 = 2;
/// The peer broke the protocol.
pub const STERNA_FAULT_PEER_MISBEHAVED: i32 = 3;

/// Why a call failed. A function that fails stores a new one at its parameter `error`, which the caller frees with
/// sterna_error_free. The parameter may be NULL. After success *error is NULL.
pub struct sterna_error {
    code: i32,
    fault: i32,
    message: CString,
}

/// The error's code, STERNA_ERROR_…; STERNA_OK for NULL.
///
/// Threads: any.
/// `error` is NULL or an error that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_error_code(error: *const sterna_error) -> i32 {
    // SAFETY: as the contract says.
    unsafe { error.as_ref() }.map_or(STERNA_OK, |error| error.code)
}

/// What failed, why, and what to do next, in English. Valid until sterna_error_free. "" for NULL.
///
/// Threads: any.
/// `error` is NULL or an error that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_error_message(error: *const sterna_error) -> *const c_char {
    // SAFETY: as the contract says.
    unsafe { error.as_ref() }.map_or(c"".as_ptr(), |error| error.message.as_ptr())
}

/// Which side has to change something, STERNA_FAULT_…; for a migration that failed.
///
/// Threads: any.
/// `error` is NULL or an error that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_error_fault(error: *const sterna_error) -> i32 {
    // SAFETY: as the contract says.
    unsafe { error.as_ref() }.map_or(STERNA_FAULT_NONE, |error| error.fault)
}

/// Frees an error. NULL is allowed.
///
/// Threads: any; each error once.
/// `error` is NULL or an error that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_error_free(error: *mut sterna_error) {
    if !error.is_null() {
        // SAFETY: `enter` has made the box, and the caller gives it back once.
        drop(unsafe { Box::from_raw(error) });
    }
}

/// Why an entry fails.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    fault: i32,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl ToString) -> Self {
        Self { code, fault: STERNA_FAULT_NONE, message: message.to_string() }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// A migration that ended with `error`.
    pub(crate) fn of_migration(code: i32, error: &MigrationError) -> Self {
        let fault = match error.fault() {
            Some(Fault::Local) => STERNA_FAULT_LOCAL,
            Some(Fault::PeerIncompatible) => STERNA_FAULT_PEER_INCOMPATIBLE,
            Some(Fault::PeerMisbehaved) => STERNA_FAULT_PEER_MISBEHAVED,
            None => STERNA_FAULT_NONE,
        };
        Self { fault, ..Self::new(code, error) }
    }

    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        Self::new(STERNA_ERROR_INTERNAL, format!("internal error, please report it: {text}"))
    }
}

impl From<Failure> for sterna_error {
    fn from(failure: Failure) -> Self {
        Self { code: failure.code, fault: failure.fault, message: new_text(&failure.message) }
    }
}
