//! The destination's side.

use std::ffi::c_char;
use std::time::Duration;

use sterna::{Arrival, Incoming, RunState, Status, TlsEndpoint};

use crate::boundary::{borrow, enter, hand_out, quietly, text, writable};
use crate::callbacks::{is_inside, may_wait};
use crate::error::{Failure, STERNA_ERROR_FAILED, STERNA_ERROR_STATE, STERNA_ERROR_TIMED_OUT, sterna_error};
use crate::events::{STERNA_STATUS_NONE, Teller, status_code, sterna_observer};
use crate::migration::{address_of, json, not_started, refused};
use crate::parameters::{Settings, sterna_parameters};
use crate::text::new_text;
use crate::vm::sterna_vm;
use crate::waiting::{Descriptor, LOOK, limit};

/// An incoming migration, or a restore from a file.
pub struct sterna_incoming {
    incoming: Incoming,
    descriptor: Descriptor,
}

impl From<Incoming> for sterna_incoming {
    fn from(incoming: Incoming) -> Self {
        Self { incoming, descriptor: Descriptor::default() }
    }
}

/// Waits at an address for a guest, and returns immediately; the address is bound then. "file:PATH" restores a
/// saved guest.
///
/// The settings must be equal on both sides. `parameters` may be NULL for the defaults, `observer` may be NULL.
/// If the call fails, the observer's `destroy` is not called.
///
/// Keep the handle after success: a source that lost the acknowledgement asks here whether the guest has
/// started. See sterna_incoming_settle.
///
/// Errors: as sterna_migration_start. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_listen(
    vm: *mut sterna_vm,
    address: *const c_char,
    parameters: *const sterna_parameters,
    observer: *const sterna_observer,
    incoming: *mut *mut sterna_incoming,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(incoming, "incoming")?;
            let vm = borrow(vm, "vm")?;
            let address = address_of(text(address, "address")?)?;
            let (values, capabilities) = Settings::of(parameters)?.for_engine(TlsEndpoint::Server)?;
            let machine = vm.machine()?;
            let teller = Teller::new(observer)?;
            let listening =
                teller.watch(|teller| Incoming::listen(machine, &address, values, capabilities, teller));
            hand_out(incoming, sterna_incoming::from(listening.map_err(not_started)?));
            Ok(())
        })
    }
}

/// The address at which the guest is expected, with the port that the system chose. The caller frees it with
/// sterna_string_free. NULL for NULL.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_address(incoming: *const sterna_incoming) -> *mut c_char {
    quietly(std::ptr::null_mut(), || {
        // SAFETY: the header has these contracts.
        let address = unsafe { incoming.as_ref() }.map(|this| this.incoming.address().to_string());
        address.map_or(std::ptr::null_mut(), |text| new_text(&text).into_raw())
    })
}

/// Waits for the end of the migration: STERNA_OK if the guest has arrived. `*is_running` is then whether it
/// runs; NULL is allowed. `timeout_ms` is as in sterna_migration_wait.
///
/// Errors: STERNA_ERROR_TIMED_OUT, STERNA_ERROR_FAILED, also after a cancel. Threads: any, several at a time,
/// but not in a callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_wait(
    incoming: *mut sterna_incoming,
    timeout_ms: i64,
    is_running: *mut bool,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_incoming_wait")?;
            let this = borrow(incoming, "incoming")?;
            let arrival = match limit(timeout_ms) {
                Some(limit) => this.incoming.wait_timeout(limit),
                None => Some(this.incoming.wait()),
            };
            match arrival {
                Some(Arrival::Completed(state)) => {
                    if !is_running.is_null() {
                        is_running.write(state == RunState::Running);
                    }
                    Ok(())
                }
                Some(Arrival::Failed(error)) => Err(Failure::of_migration(STERNA_ERROR_FAILED, &error)),
                // `Arrival` is non-exhaustive.
                _ => Err(Failure::new(STERNA_ERROR_TIMED_OUT, "no guest has arrived within the time-out")),
            }
        })
    }
}

/// A descriptor that becomes readable at each event and at the end; see sterna_migration_event_fd.
///
/// Errors: STERNA_ERROR_SYSTEM. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_event_fd(
    incoming: *mut sterna_incoming,
    fd: *mut i32,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(fd, "fd")?;
            let this = borrow(incoming, "incoming")?;
            fd.write(this.descriptor.number(|| this.incoming.event_fd())?);
            Ok(())
        })
    }
}

/// Cancels the migration on this side and discards the guest.
///
/// Errors: STERNA_ERROR_STATE after the guest was handed over to this side, or if it is held. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_cancel(
    incoming: *mut sterna_incoming,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(incoming, "incoming")?.incoming.cancel().map_err(refused)) }
}

/// As sterna_incoming_cancel, but a held guest is discarded as well. It may be the only copy.
///
/// Errors: STERNA_ERROR_STATE after the guest was handed over to this side and started. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_discard(
    incoming: *mut sterna_incoming,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(incoming, "incoming")?.incoming.discard().map_err(refused)) }
}

/// Starts a held guest (STERNA_STATUS_HELD), after acquiring the hooks that it lacks. If that fails, the guest is held
/// again. Returns before the guest has started.
///
/// Errors: STERNA_ERROR_STATE if no guest is held. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_release(
    incoming: *mut sterna_incoming,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(incoming, "incoming")?.incoming.release().map_err(refused)) }
}

/// Sets whether a guest that ran at the source starts when it has arrived (default: true). Otherwise it arrives
/// paused.
///
/// Errors: STERNA_ERROR_STATE if it is too late. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_set_autostart(
    incoming: *mut sterna_incoming,
    on: bool,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            if borrow(incoming, "incoming")?.incoming.set_autostart(on) {
                return Ok(());
            }
            Err(Failure::new(
                STERNA_ERROR_STATE,
                "the handover of the guest has begun: pause or resume it after it has arrived",
            ))
        })
    }
}

/// Listens at `address` as well, for the source of a postcopy that lost its connection.
///
/// Errors: STERNA_ERROR_STATE unless the status is STERNA_STATUS_POSTCOPY_PAUSED, STERNA_ERROR_ARGUMENT.
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_recover_at(
    incoming: *mut sterna_incoming,
    address: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let this = borrow(incoming, "incoming")?;
            let address = address_of(text(address, "address")?)?;
            this.incoming.recover_at(&address).map_err(refused)
        })
    }
}

/// The status now, STERNA_STATUS_…; STERNA_STATUS_NONE for NULL.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_status(incoming: *const sterna_incoming) -> i32 {
    quietly(STERNA_STATUS_NONE, || {
        // SAFETY: the header has these contracts.
        let this = unsafe { incoming.as_ref() };
        this.map_or(STERNA_STATUS_NONE, |this| status_code(this.incoming.status()))
    })
}

/// The statistics now, as a JSON object, which the caller frees with sterna_string_free. NULL for NULL.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_statistics(incoming: *const sterna_incoming) -> *mut c_char {
    quietly(std::ptr::null_mut(), || {
        // SAFETY: the header has these contracts.
        let statistics = unsafe { incoming.as_ref() }.map(|this| this.incoming.statistics());
        json(statistics)
    })
}

/// Waits for the end of the migration, answers the source's questions until none has arrived for `quiet_ms`
/// milliseconds, and then frees the handle. 60,000 are enough with the default limits. On return the address is
/// released, no thread of the migration runs, and the library uses guest memory only for the VM's handle.
///
/// The result is STERNA_OK if the guest has arrived. The handle is freed after STERNA_ERROR_FAILED, too, but not after
/// another error.
///
/// Errors: STERNA_ERROR_FAILED; STERNA_ERROR_STATE in a callback. Threads: any, once, and no other call with this
/// handle runs: a program that may have to cancel calls sterna_incoming_wait first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_settle(
    incoming: *mut sterna_incoming,
    quiet_ms: u64,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_incoming_settle")?;
            borrow(incoming, "incoming")?;
            // The box is of `sterna_incoming_listen` or of `…_with`, and the caller gives it back once.
            let this = Box::from_raw(incoming);
            match this.incoming.settle(Duration::from_millis(quiet_ms)) {
                Arrival::Failed(error) => Err(Failure::of_migration(STERNA_ERROR_FAILED, &error)),
                _ => Ok(()),
            }
        })
    }
}

/// Frees the handle, and releases the address. A migration that is not committed is cancelled, and the call
/// waits for its end. A postcopy whose pages have not all arrived cannot be cancelled: the call waits until they
/// have, also while its connection is lost, because the guest runs here and needs them. A held guest stays
/// loaded in its VM.
///
/// In a callback the call cancels and does not wait. NULL is allowed. Threads: any, once, and no other call with
/// this handle runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_free(incoming: *mut sterna_incoming) {
    if incoming.is_null() {
        return;
    }
    quietly((), || {
        // SAFETY: `sterna_incoming_listen` or `…_with` has made the box, and the caller gives it back once.
        let this = unsafe { Box::from_raw(incoming) };
        if this.incoming.arrival().is_none() {
            let _ = this.incoming.cancel();
        }
        while !is_inside() && this.incoming.status() != Status::Held {
            if this.incoming.wait_timeout(LOOK).is_some() {
                break;
            }
        }
    });
}
