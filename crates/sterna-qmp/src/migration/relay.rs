//! The engine's events, as QMP's; and the start of a held guest that was told to run before it had come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use serde_json::json;
use sterna::{Event, Observer, Status};

use super::engine::Receiving;
use super::query::{UNDECIDED, status_word};
use crate::server::EventBus;

/// Every event that the control emits.
pub(crate) const EVENTS: &[&str] = &[
    "STOP",
    "RESUME",
    "MIGRATION",
    "MIGRATION_PASS",
    "COLO_EXIT",
    "SHUTDOWN",
    "X_STERNA_UNDECIDED",
    "X_STERNA_WARNING",
];

/// Observes one VM's migrations.
#[derive(Default)]
pub(crate) struct Relay {
    pub bus: EventBus,
    /// Capability `events`.
    pub migration_events: AtomicBool,
    /// `cont` came while the guest was still on its way.
    pub start_when_held: AtomicBool,
    pub incoming: Mutex<Option<Arc<dyn Receiving>>>,
}

impl Relay {
    fn emit_if_asked(&self, name: &str, data: serde_json::Value) {
        if self.migration_events.load(Ordering::Relaxed) {
            self.bus.emit(name, Some(data));
        }
    }

    /// Starts a held guest if it was told to run, in a thread of its own: observers may not call back.
    fn held(&self) {
        if !self.start_when_held.load(Ordering::SeqCst) {
            return;
        }
        let Some(incoming) = self.incoming.lock().clone() else { return };
        let bus = self.bus.clone();
        let release = move || {
            if let Err(why) = incoming.release() {
                bus.emit("X_STERNA_WARNING", Some(json!({"warning": why})));
            }
        };
        if let Err(error) = thread::Builder::new().name("qmp-release".into()).spawn(release) {
            let warning = format!("the guest was not started ({error}); send 'cont' again");
            self.bus.emit("X_STERNA_WARNING", Some(json!({"warning": warning})));
        }
    }
}

impl Observer for Relay {
    fn event(&self, event: &Event) {
        match event {
            Event::Stopped => self.bus.emit("STOP", None),
            Event::Resumed => self.bus.emit("RESUME", None),
            Event::Round(pass) => self.emit_if_asked("MIGRATION_PASS", json!({"pass": pass})),
            Event::Status(Status::Undecided) => {
                self.bus.emit("X_STERNA_UNDECIDED", Some(json!({"reason": UNDECIDED})));
            }
            Event::Status(status) => {
                self.emit_if_asked("MIGRATION", json!({"status": status_word(*status)}));
                if *status == Status::Held {
                    self.held();
                }
            }
            Event::ConnectionLost { why } => {
                self.emit_if_asked("X_STERNA_CONNECTION_LOST", json!({"reason": why}));
            }
            Event::Reconnected { took, resent_bytes } => {
                let time = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
                let data = json!({"time": time, "resent-bytes": resent_bytes});
                self.emit_if_asked("X_STERNA_RECONNECTED", data);
            }
            Event::Warning(warning) => self.emit_if_asked("X_STERNA_WARNING", json!({"warning": warning})),
            _ => {}
        }
    }
}
