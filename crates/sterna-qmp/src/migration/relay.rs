//! Sends the engine's events as QMP events, and starts a held guest if `cont` arrived before the guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use serde_json::json;
use sterna::{Event, Observer, Status};

use super::engine::Receiving;
use super::events::{
    MIGRATION, MIGRATION_PASS, RESUME, STOP, X_STERNA_CONNECTION_LOST, X_STERNA_RECONNECTED,
    X_STERNA_UNDECIDED, X_STERNA_WARNING,
};
use super::query::{UNDECIDED, status_word};
use crate::server::{EventBus, EventSpec};

/// Observes the migrations of one VM.
#[derive(Default)]
pub(crate) struct Relay {
    pub bus: EventBus,
    /// Whether the capability `events` is on.
    pub migration_events: AtomicBool,
    /// Whether `cont` was executed before the guest had arrived.
    pub start_when_held: AtomicBool,
    pub incoming: Mutex<Option<Arc<dyn Receiving>>>,
}

impl Relay {
    fn emit_if_asked(&self, event: &EventSpec, data: serde_json::Value) {
        if self.migration_events.load(Ordering::Relaxed) {
            self.bus.emit(event, Some(data));
        }
    }

    /// Starts a held guest if `cont` was executed before. Uses a thread, because observers may not call the engine.
    fn held(&self) {
        if !self.start_when_held.load(Ordering::SeqCst) {
            return;
        }
        let Some(incoming) = self.incoming.lock().clone() else { return };
        let bus = self.bus.clone();
        let release = move || {
            if let Err(why) = incoming.release() {
                bus.emit(&X_STERNA_WARNING, Some(json!({"warning": why})));
            }
        };
        if let Err(error) = thread::Builder::new().name("qmp-release".into()).spawn(release) {
            let warning = format!("the guest was not started ({error}); send 'cont' again");
            self.bus.emit(&X_STERNA_WARNING, Some(json!({"warning": warning})));
        }
    }
}

impl Observer for Relay {
    fn event(&self, event: &Event) {
        match event {
            Event::Stopped => self.bus.emit(&STOP, None),
            Event::Resumed => self.bus.emit(&RESUME, None),
            Event::Round(pass) => self.emit_if_asked(&MIGRATION_PASS, json!({"pass": pass})),
            Event::Status(Status::Undecided) => {
                self.bus.emit(&X_STERNA_UNDECIDED, Some(json!({"reason": UNDECIDED})));
            }
            Event::Status(status) => {
                self.emit_if_asked(&MIGRATION, json!({"status": status_word(*status)}));
                if *status == Status::Held {
                    self.held();
                }
            }
            Event::ConnectionLost { why } => {
                self.emit_if_asked(&X_STERNA_CONNECTION_LOST, json!({"reason": why}));
            }
            Event::Reconnected { took, resent_bytes } => {
                let time = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
                let data = json!({"time": time, "resent-bytes": resent_bytes});
                self.emit_if_asked(&X_STERNA_RECONNECTED, data);
            }
            Event::Warning(warning) => self.emit_if_asked(&X_STERNA_WARNING, json!({"warning": warning})),
            _ => {}
        }
    }
}
