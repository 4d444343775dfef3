//! Statuses and events.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use serde_json::{Value, json};
use sterna::{Event, Observer, StartError, Status};

use crate::boundary::{Done, Versioned, read};
use crate::callbacks::{Owned, inside, sterna_notice};
use crate::text::new_text;

/// No migration was started.
pub const STERNA_STATUS_NONE: i32 = 0;
/// The sides connect.
pub const STERNA_STATUS_SETUP: i32 = 1;
/// A cancel takes effect.
pub const STERNA_STATUS_CANCELLING: i32 = 2;
/// Cancelled; the guest is at the source, as before.
pub const STERNA_STATUS_CANCELLED: i32 = 3;
/// The source sends memory while the guest runs.
pub const STERNA_STATUS_ACTIVE: i32 = 4;
/// The guest is stopped; the source waits for sterna_migration_continue.
pub const STERNA_STATUS_PRE_SWITCHOVER: i32 = 5;
/// The guest is stopped; the source sends the rest.
pub const STERNA_STATUS_DEVICE: i32 = 6;
/// The guest is stopped; the source sends its devices, and pages follow later.
pub const STERNA_STATUS_POSTCOPY_DEVICE: i32 = 7;
/// The guest runs at the destination, and its pages follow.
pub const STERNA_STATUS_POSTCOPY_ACTIVE: i32 = 8;
/// Postcopy lost its connection.
pub const STERNA_STATUS_POSTCOPY_PAUSED: i32 = 9;
/// Postcopy has a new connection.
pub const STERNA_STATUS_POSTCOPY_RECOVER: i32 = 10;
/// The destination has the guest, or the file is complete.
pub const STERNA_STATUS_COMPLETED: i32 = 11;
/// A failure takes effect.
pub const STERNA_STATUS_FAILING: i32 = 12;
/// The migration failed.
pub const STERNA_STATUS_FAILED: i32 = 13;
/// The acknowledgement was lost: the guest stays stopped at the source, which asks the destination.
pub const STERNA_STATUS_UNDECIDED: i32 = 14;
/// Destination of a QEMU source: the loaded guest waits for sterna_incoming_release.
pub const STERNA_STATUS_HELD: i32 = 15;
/// A status of a newer engine.
pub const STERNA_STATUS_OTHER: i32 = 16;

/// The status changed: `status`.
pub const STERNA_EVENT_STATUS: i32 = 0;
/// A round of pages began.
pub const STERNA_EVENT_ROUND: i32 = 1;
/// The guest was stopped for the switchover.
pub const STERNA_EVENT_STOPPED: i32 = 2;
/// The guest runs: at the source again, or at the destination.
pub const STERNA_EVENT_RESUMED: i32 = 3;
/// From here on only the destination may start the guest.
pub const STERNA_EVENT_COMMITTED: i32 = 4;
/// The connection was lost, and the source connects again.
pub const STERNA_EVENT_CONNECTION_LOST: i32 = 5;
/// A new connection replaces the lost one.
pub const STERNA_EVENT_RECONNECTED: i32 = 6;
/// Something that the operator should know, and that does not end the migration: `text`.
pub const STERNA_EVENT_WARNING: i32 = 7;
/// Another event: see `json`.
pub const STERNA_EVENT_OTHER: i32 = 8;

/// An event. Valid until the callback returns.
#[repr(C)]
pub struct sterna_event {
    /// STERNA_EVENT_….
    pub kind: i32,
    /// STERNA_STATUS_…, with STERNA_EVENT_STATUS; otherwise STERNA_STATUS_NONE.
    pub status: i32,
    /// The event in words.
    pub text: *const c_char,
    /// The event as a JSON object: "event", and members of this kind. Times are in milliseconds.
    pub json: *const c_char,
}

/// Receives the events of a migration, in order, on threads of the library. The callback returns soon, because
/// the migration waits for it. It calls no function of this migration.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_observer {
    /// sizeof(sterna_observer).
    pub size: usize,
    /// Passed to the callbacks.
    pub user: *mut c_void,
    /// Called for each event.
    pub event: Option<unsafe extern "C" fn(user: *mut c_void, event: *const sterna_event)>,
    /// Called once, after the last event: when the migration has ended and was freed. May be NULL.
    pub destroy: sterna_notice,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_observer {
    const NAME: &str = "sterna_observer";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// QEMU's word for a status, such as "active"; NULL for an unknown number. The text is static.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn sterna_status_name(status: i32) -> *const c_char {
    NAMES.iter().find(|(code, ..)| *code == status).map_or(std::ptr::null(), |(_, _, name)| name.as_ptr())
}

/// Each status with its word.
const NAMES: &[(i32, Status, &std::ffi::CStr)] = &[
    (STERNA_STATUS_NONE, Status::None, c"none"),
    (STERNA_STATUS_SETUP, Status::Setup, c"setup"),
    (STERNA_STATUS_CANCELLING, Status::Cancelling, c"cancelling"),
    (STERNA_STATUS_CANCELLED, Status::Cancelled, c"cancelled"),
    (STERNA_STATUS_ACTIVE, Status::Active, c"active"),
    (STERNA_STATUS_PRE_SWITCHOVER, Status::PreSwitchover, c"pre-switchover"),
    (STERNA_STATUS_DEVICE, Status::Device, c"device"),
    (STERNA_STATUS_POSTCOPY_DEVICE, Status::PostcopyDevice, c"postcopy-device"),
    (STERNA_STATUS_POSTCOPY_ACTIVE, Status::PostcopyActive, c"postcopy-active"),
    (STERNA_STATUS_POSTCOPY_PAUSED, Status::PostcopyPaused, c"postcopy-paused"),
    (STERNA_STATUS_POSTCOPY_RECOVER, Status::PostcopyRecover, c"postcopy-recover"),
    (STERNA_STATUS_COMPLETED, Status::Completed, c"completed"),
    (STERNA_STATUS_FAILING, Status::Failing, c"failing"),
    (STERNA_STATUS_FAILED, Status::Failed, c"failed"),
    (STERNA_STATUS_UNDECIDED, Status::Undecided, c"undecided"),
    (STERNA_STATUS_HELD, Status::Held, c"held"),
];

pub(crate) fn status_code(status: Status) -> i32 {
    NAMES.iter().find(|(_, known, _)| *known == status).map_or(STERNA_STATUS_OTHER, |(code, ..)| *code)
}

/// The observer of a migration: calls the program.
pub(crate) struct Teller {
    given: Option<(sterna_observer, Owned)>,
}

// SAFETY: the callbacks may be called on any thread, by their contract.
unsafe impl Send for Teller {}
// SAFETY: as above.
unsafe impl Sync for Teller {}

impl Teller {
    /// # Safety
    /// `observer` is as the header says.
    pub(crate) unsafe fn new(observer: *const sterna_observer) -> Done<Self> {
        if observer.is_null() {
            return Ok(Self { given: None });
        }
        // SAFETY: as the contract says.
        let given = unsafe { read(observer) }?;
        Ok(Self { given: Some((given, Owned::offered(given.user, given.destroy))) })
    }

    /// Starts a migration with this observer. Only if that succeeds, the library ends the use of the program's
    /// pointer.
    pub(crate) fn watch<T>(
        self,
        start: impl FnOnce(Arc<dyn Observer>) -> Result<T, StartError>,
    ) -> Result<T, StartError> {
        let this = Arc::new(self);
        let started = start(Arc::clone(&this) as Arc<dyn Observer>)?;
        if let Some((_, owned)) = &this.given {
            owned.take();
        }
        Ok(started)
    }
}

impl Observer for Teller {
    fn event(&self, event: &Event) {
        if let Some((sterna_observer { event: Some(tell), .. }, owned)) = &self.given {
            let (kind, status, text, json) = described(event);
            let (text, json) = (new_text(&text), new_text(&json.to_string()));
            let told = sterna_event { kind, status, text: text.as_ptr(), json: json.as_ptr() };
            // SAFETY: the program gave the callback for this pointer, which `owned` keeps from being destroyed.
            inside(|| unsafe { tell(owned.pointer(), &raw const told) });
        }
    }
}

/// Kind, status, words and members of an event.
fn described(event: &Event) -> (i32, i32, String, Value) {
    let of = |kind, text: &str, json| (kind, STERNA_STATUS_NONE, text.to_owned(), json);
    match event {
        Event::Status(status) => {
            let word = status.to_string();
            let json = json!({"event": "status", "status": word});
            (STERNA_EVENT_STATUS, status_code(*status), word, json)
        }
        Event::Round(number) => {
            of(STERNA_EVENT_ROUND, &format!("round {number}"), json!({"event": "round", "number": number}))
        }
        Event::Stopped => of(STERNA_EVENT_STOPPED, "the guest was stopped", json!({"event": "stopped"})),
        Event::Resumed => of(STERNA_EVENT_RESUMED, "the guest runs", json!({"event": "resumed"})),
        Event::Committed => of(STERNA_EVENT_COMMITTED, "committed", json!({"event": "committed"})),
        Event::ConnectionLost { why } => {
            of(STERNA_EVENT_CONNECTION_LOST, why, json!({"event": "connection-lost", "why": why}))
        }
        Event::Reconnected { took, resent_bytes } => {
            let json =
                json!({"event": "reconnected", "took": milliseconds(*took), "resent-bytes": resent_bytes});
            of(STERNA_EVENT_RECONNECTED, "a new connection replaces the lost one", json)
        }
        Event::Warning(text) => of(STERNA_EVENT_WARNING, text, json!({"event": "warning", "text": text})),
        Event::Peer { sterna, features } => {
            let json = json!({"event": "peer", "sterna": sterna, "features": features});
            of(
                STERNA_EVENT_OTHER,
                if *sterna { "the peer is a Sterna" } else { "the peer is no Sterna" },
                json,
            )
        }
        Event::Prepared => of(STERNA_EVENT_OTHER, "prepared", json!({"event": "prepared"})),
        Event::SwitchoverStep { step, took } => {
            let step = serde_json::to_value(step).unwrap_or_default();
            let json = json!({"event": "switchover-step", "step": step, "took": milliseconds(*took)});
            of(STERNA_EVENT_OTHER, "a step of the switchover ended", json)
        }
        other => of(STERNA_EVENT_OTHER, &format!("{other:?}"), json!({"event": "other"})),
    }
}

fn milliseconds(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
