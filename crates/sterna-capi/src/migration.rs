//! The source's side.

use std::ffi::c_char;

use parking_lot::Mutex;
use sterna::{Address, Decision, Migration, Outcome, StartError, Status, TlsEndpoint, Waited};

use crate::boundary::{Done, borrow, enter, hand_out, quietly, text, writable};
use crate::callbacks::{is_inside, may_wait};
use crate::error::{
    Failure, STERNA_ERROR_ARGUMENT, STERNA_ERROR_CANCELLED, STERNA_ERROR_FAILED, STERNA_ERROR_HELD,
    STERNA_ERROR_SETTINGS, STERNA_ERROR_STATE, STERNA_ERROR_SYSTEM, STERNA_ERROR_TIMED_OUT,
    STERNA_ERROR_UNDECIDED, sterna_error,
};
use crate::events::{STERNA_STATUS_NONE, Teller, status_code, sterna_observer};
use crate::parameters::{Settings, sterna_parameters};
use crate::text::new_text;
use crate::vm::sterna_vm;
use crate::waiting::{Descriptor, LOOK, limit};

/// The source runs the guest: the operator vouches that the destination does not run it and never will.
pub const STERNA_SOURCE_RUNS: i32 = 0;
/// The destination runs the guest: the source gives it up.
pub const STERNA_DESTINATION_RUNS: i32 = 1;

/// An outgoing migration, or a save to a file.
pub struct sterna_migration {
    migration: Migration,
    settings: Mutex<Settings>,
    descriptor: Descriptor,
}

/// Starts to migrate the guest of `vm` to an address, and returns immediately. The address is "tcp:HOST:PORT",
/// "unix:PATH", "fd:NUMBER", "rdma:HOST:PORT", or "file:PATH", which saves the guest.
///
/// The guest runs until the switchover. If anything fails before the commit, it continues to run here. After a
/// save it stays stopped; see sterna_migration_resume_saved. `parameters` may be NULL for the defaults,
/// `observer` may be NULL. If the call fails, the observer's `destroy` is not called.
///
/// Errors: STERNA_ERROR_ARGUMENT for the address, STERNA_ERROR_SETTINGS, STERNA_ERROR_CREDENTIALS,
/// STERNA_ERROR_STATE if another migration has the guest, STERNA_ERROR_SYSTEM. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_start(
    vm: *mut sterna_vm,
    address: *const c_char,
    parameters: *const sterna_parameters,
    observer: *const sterna_observer,
    migration: *mut *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(migration, "migration")?;
            let vm = borrow(vm, "vm")?;
            let address = address_of(text(address, "address")?)?;
            let settings = Settings::of(parameters)?;
            let (values, capabilities) = settings.for_engine(TlsEndpoint::Client)?;
            let machine = vm.source()?;
            let teller = Teller::new(observer)?;
            let started =
                teller.watch(|teller| Migration::start(machine, &address, values, capabilities, teller));
            let settings = Mutex::new(settings);
            hand_out(
                migration,
                sterna_migration {
                    migration: started.map_err(not_started)?,
                    settings,
                    descriptor: Descriptor::default(),
                },
            );
            Ok(())
        })
    }
}

/// Waits for the end of the migration: STERNA_OK if the destination has the guest or the file is complete.
/// `timeout_ms` is in milliseconds; 0 asks without waiting, a negative value waits without limit. May be called
/// again.
///
/// Errors: STERNA_ERROR_TIMED_OUT. STERNA_ERROR_UNDECIDED when the migration becomes undecided, or after the
/// time-out if it was undecided before; without a time-out the call waits until that has ended.
/// STERNA_ERROR_CANCELLED, STERNA_ERROR_FAILED, STERNA_ERROR_HELD. Threads: any, several at a time, but not in a
/// callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_wait(
    migration: *mut sterna_migration,
    timeout_ms: i64,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_migration_wait")?;
            let this = borrow(migration, "migration")?;
            let waited = match limit(timeout_ms) {
                Some(limit) => this.migration.wait_timeout(limit),
                None => Waited::Ended(this.migration.wait()),
            };
            match waited {
                Waited::Ended(outcome) => ended(outcome),
                Waited::Undecided => Err(Failure::new(
                    STERNA_ERROR_UNDECIDED,
                    this.migration
                        .statistics()
                        .error
                        .unwrap_or_else(|| "the migration is undecided".to_owned()),
                )),
                _ => Err(Failure::new(
                    STERNA_ERROR_TIMED_OUT,
                    "the migration has not ended within the time-out",
                )),
            }
        })
    }
}

/// A descriptor that becomes readable at each event and at the end, for poll and epoll. When it is readable,
/// read 8 bytes from it, then ask for the status or call sterna_migration_wait with the time-out 0. It belongs
/// to the handle: do not close it.
///
/// Errors: STERNA_ERROR_SYSTEM. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_event_fd(
    migration: *mut sterna_migration,
    fd: *mut i32,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(fd, "fd")?;
            let this = borrow(migration, "migration")?;
            fd.write(this.descriptor.number(|| this.migration.event_fd())?);
            Ok(())
        })
    }
}

/// Cancels the migration; the guest continues to run here. Returns without waiting.
///
/// Errors: STERNA_ERROR_STATE from the commit on, because the destination may run the guest. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_cancel(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(migration, "migration")?.migration.cancel().map_err(refused)) }
}

/// Changes a parameter of the running migration. docs/qmp.md says which parameters a running migration follows.
///
/// Errors: as sterna_parameters_set, and STERNA_ERROR_SETTINGS for a parameter that is fixed. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_set(
    migration: *mut sterna_migration,
    name: *const c_char,
    value: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let this = borrow(migration, "migration")?;
            let (name, value) = (text(name, "name")?, text(value, "value")?);
            let mut settings = this.settings.lock();
            let mut next = settings.clone();
            next.set(name, value, true)?;
            let wanted = next.live();
            let changed = this.migration.set_live(|parameters| parameters.take_live(&wanted));
            changed.map_err(|error| Failure::new(STERNA_ERROR_SETTINGS, error))?;
            *settings = next;
            Ok(())
        })
    }
}

/// Continues the switchover after the capability "pause-before-switchover".
///
/// Errors: STERNA_ERROR_STATE unless the status is STERNA_STATUS_PRE_SWITCHOVER. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_continue(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || borrow(migration, "migration")?.migration.continue_switchover().map_err(refused))
    }
}

/// Switches to postcopy: the guest resumes at the destination before its pages are there. Needs the capability
/// "postcopy-ram" on both sides.
///
/// Errors: STERNA_ERROR_STATE. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_start_postcopy(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(migration, "migration")?.migration.start_postcopy().map_err(refused)) }
}

/// Resumes a postcopy that lost its connection, over a new connection to `address`.
///
/// Errors: STERNA_ERROR_STATE unless the status is STERNA_STATUS_POSTCOPY_PAUSED, STERNA_ERROR_ARGUMENT.
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_recover(
    migration: *mut sterna_migration,
    address: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let this = borrow(migration, "migration")?;
            let address = address_of(text(address, "address")?)?;
            this.migration.resume(&address).map_err(refused)
        })
    }
}

/// Breaks the connection of a postcopy on purpose, so that sterna_migration_recover can name another.
///
/// Errors: STERNA_ERROR_STATE. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_pause_postcopy(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(migration, "migration")?.migration.pause().map_err(refused)) }
}

/// Ends an undecided migration by the operator's decision: STERNA_SOURCE_RUNS or STERNA_DESTINATION_RUNS.
///
/// In postcopy, STERNA_DESTINATION_RUNS changes an undecided migration to STERNA_STATUS_POSTCOPY_PAUSED, and
/// sterna_migration_recover sends the pages that the destination lacks. A second STERNA_DESTINATION_RUNS there gives
/// these pages up, and ends the migration.
///
/// Errors: STERNA_ERROR_STATE unless the status is STERNA_STATUS_UNDECIDED or that of a paused postcopy, and for
/// STERNA_SOURCE_RUNS in a paused postcopy. STERNA_ERROR_ARGUMENT. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_decide(
    migration: *mut sterna_migration,
    runs_at: i32,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let this = borrow(migration, "migration")?;
            let decision = match runs_at {
                STERNA_SOURCE_RUNS => Decision::SourceRuns,
                STERNA_DESTINATION_RUNS => Decision::DestinationRuns,
                other => {
                    return Err(Failure::new(
                        STERNA_ERROR_ARGUMENT,
                        format!("runs_at is {other}: use 0 or 1"),
                    ));
                }
            };
            this.migration.decide(decision).map_err(refused)
        })
    }
}

/// Tries again to resume a held guest (STERNA_ERROR_HELD). Waits for the end of the last attempt; then wait again.
///
/// Errors: STERNA_ERROR_STATE if no guest is held. Threads: any, but not in a callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_retry(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_migration_retry")?;
            borrow(migration, "migration")?.migration.retry().map_err(refused)
        })
    }
}

/// Resumes a guest that was saved to a file. The file is then a snapshot of an earlier state.
///
/// Errors: STERNA_ERROR_STATE. Threads: any, but not in a callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_resume_saved(
    migration: *mut sterna_migration,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_migration_resume_saved")?;
            borrow(migration, "migration")?.migration.resume_saved().map_err(refused)
        })
    }
}

/// The status now, STERNA_STATUS_…; STERNA_STATUS_NONE for NULL.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_status(migration: *const sterna_migration) -> i32 {
    quietly(STERNA_STATUS_NONE, || {
        // SAFETY: the header has these contracts.
        let this = unsafe { migration.as_ref() };
        this.map_or(STERNA_STATUS_NONE, |this| status_code(this.migration.status()))
    })
}

/// The statistics now, as a JSON object, which the caller frees with sterna_string_free. NULL for NULL.
/// docs/c-api.md names the members.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_statistics(migration: *const sterna_migration) -> *mut c_char {
    quietly(std::ptr::null_mut(), || {
        // SAFETY: the header has these contracts.
        let statistics = unsafe { migration.as_ref() }.map(|this| this.migration.statistics());
        json(statistics)
    })
}

/// Frees the handle. A migration that runs is cancelled, and the call waits for its end. From the commit on it
/// cannot be cancelled; the call then waits until it has ended. It does not wait for a migration that is
/// undecided, or a postcopy that lost its connection: these continue without a handle, and keep the VM.
///
/// In a callback the call cancels and does not wait. NULL is allowed. Threads: any, once, and no other call with
/// this handle runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_migration_free(migration: *mut sterna_migration) {
    if migration.is_null() {
        return;
    }
    quietly((), || {
        // SAFETY: `sterna_migration_start` has made the box, and the caller gives it back once.
        let this = unsafe { Box::from_raw(migration) };
        if this.migration.outcome().is_none() {
            let _ = this.migration.cancel();
        }
        let can_end = || !matches!(this.migration.status(), Status::Undecided | Status::PostcopyPaused);
        while !is_inside() && can_end() {
            if let Waited::Ended(_) | Waited::Undecided = this.migration.wait_timeout(LOOK) {
                break;
            }
        }
    });
}

fn ended(outcome: Outcome) -> Done {
    match outcome {
        Outcome::Completed => Ok(()),
        Outcome::Cancelled => Err(Failure::new(STERNA_ERROR_CANCELLED, "the migration was cancelled")),
        Outcome::Failed { error, held: true } => Err(Failure::of_migration(STERNA_ERROR_HELD, &error)),
        Outcome::Failed { error, .. } => Err(Failure::of_migration(STERNA_ERROR_FAILED, &error)),
        other => Err(Failure::new(STERNA_ERROR_FAILED, format!("{other:?}"))),
    }
}

pub(crate) fn address_of(text: &str) -> Done<Address> {
    text.parse().map_err(|error| Failure::new(STERNA_ERROR_ARGUMENT, error))
}

pub(crate) fn not_started(error: StartError) -> Failure {
    let code = match &error {
        StartError::Guest(_) | StartError::Tracked | StartError::Poisoned { .. } => STERNA_ERROR_STATE,
        StartError::System(_) => STERNA_ERROR_SYSTEM,
        _ => STERNA_ERROR_SETTINGS,
    };
    Failure::new(code, error)
}

pub(crate) fn refused(refusal: impl ToString) -> Failure {
    Failure::new(STERNA_ERROR_STATE, refusal)
}

/// Statistics as a text for the caller.
pub(crate) fn json(statistics: Option<impl serde::Serialize>) -> *mut c_char {
    let text = statistics.and_then(|statistics| serde_json::to_string(&statistics).ok());
    text.map_or(std::ptr::null_mut(), |text| new_text(&text).into_raw())
}
