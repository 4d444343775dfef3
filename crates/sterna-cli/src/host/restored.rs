//! The memory of a guest that was restored from an image and runs before all of it is loaded.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use sterna_pager::{GuestEnd, GuestError, GuestStage, OwnEvents, Pager, WorkingSet};
use sterna_qmp::migration::events::X_STERNA_RESTORE;
use sterna_qmp::server::MemberKind::{Integer, Number, String as Text, Word};
use sterna_qmp::server::{CommandSpec, MemberKind, MemberSpec};
use sterna_qmp::{EventBus, MigrationControl};

use crate::terminal;

/// How far the memory is.
const STATUS: &[&str] = &["none", "loading", "active", "completed", "failed"];

/// The command that shows how far the memory is.
#[rustfmt::skip]
pub const QUERY_RESTORE: CommandSpec =
    CommandSpec::new("x-sterna-query-restore", "Returns how far the guest's memory was loaded from the image that it was \
                                                restored from (`sterna run --restore`).")
    .returns(MemberKind::Members(&[
        MemberSpec::required("status", Word(STATUS), "`none`: the guest was not restored from an image; `loading`: it does \
            not run yet; `active`: it can run, and pages are missing; `completed`: it does not need the image any more; \
            `failed`: a page could not be loaded, and the guest is stopped."),
        MemberSpec::optional("image", Text, "The image."),
        MemberSpec::optional("error", Text, "Which page of the guest and which frame of the image could not be loaded, and \
            what to do."),
        MemberSpec::optional("start-time", Number, "Seconds from the command's start until the guest could run."),
        MemberSpec::optional("page-bytes", Integer, "Bytes of a page; the members that follow count such pages, and are \
            there after a lazy restore."),
        MemberSpec::optional("total-pages", Integer, "Pages of the guest."),
        MemberSpec::optional("missing-pages", Integer, "Pages that are not loaded."),
        MemberSpec::optional("content-pages", Integer, "Pages that were loaded with content."),
        MemberSpec::optional("zero-pages", Integer, "Pages that were found to be zero."),
        MemberSpec::optional("removed-pages", Integer, "Pages that the guest has given back."),
        MemberSpec::optional("faults", Integer, "Accesses that waited for a page."),
        MemberSpec::optional("time", Number, "Seconds that the guest needed the image, until now or until the end."),
    ]));

/// How far a restored guest's memory is. Shared by the monitor, the command and the pager.
pub struct Restored {
    began: Instant,
    image: OnceLock<String>,
    bus: EventBus,
    control: OnceLock<Weak<MigrationControl>>,
    pager: Mutex<Option<Pager>>,
    start_time: OnceLock<Duration>,
    failure: OnceLock<String>,
}

impl Restored {
    /// The state of a VM that was started at `began`. Events go to `bus`.
    pub fn new(began: Instant, bus: EventBus) -> Arc<Self> {
        Arc::new(Self {
            began,
            image: OnceLock::new(),
            bus,
            control: OnceLock::new(),
            pager: Mutex::default(),
            start_time: OnceLock::new(),
            failure: OnceLock::new(),
        })
    }

    /// States that the guest comes from `image`. A failure stops it by `control`.
    pub fn begin(&self, image: &str, control: &Arc<MigrationControl>) {
        let _ = self.image.set(image.to_owned());
        let _ = self.control.set(Arc::downgrade(control));
    }

    /// Takes the pager that loads the memory.
    pub fn set_pager(&self, pager: Pager) {
        *self.pager.lock() = Some(pager);
    }

    /// States that the guest can run now. Returns the time since the beginning.
    pub fn can_run(&self) -> Duration {
        *self.start_time.get_or_init(|| self.began.elapsed())
    }

    /// Why the memory cannot be loaded.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Returns the recorded working set, after the guest's threads have ended and before the process ends.
    pub fn end(&self) -> Option<WorkingSet> {
        let pager = self.pager.lock().take()?;
        let recorded = pager.working_set();
        // Its threads may wait for a slow image. The end of the process ends them.
        std::mem::forget(pager);
        recorded
    }

    /// Answers `x-sterna-query-restore`.
    pub fn query(&self) -> Value {
        let Some(image) = self.image.get() else { return json!({"status": "none"}) };
        let mut status = if self.start_time.get().is_some() { "completed" } else { "loading" };
        let mut answer = json!({"image": image});
        let guest = self.pager.lock().as_ref().and_then(|pager| pager.guests().into_iter().next());
        if let Some(guest) = guest {
            match guest.stage {
                GuestStage::Active if status == "completed" => status = "active",
                GuestStage::Ended(GuestEnd::GivenUp { .. }) => status = "failed",
                _ => {}
            }
            answer["page-bytes"] = json!(guest.page_bytes);
            answer["total-pages"] = json!(guest.total_pages);
            answer["missing-pages"] = json!(guest.missing_pages);
            answer["content-pages"] = json!(guest.content_pages);
            answer["zero-pages"] = json!(guest.zero_pages);
            answer["removed-pages"] = json!(guest.removed_pages);
            answer["faults"] = json!(guest.faults);
            answer["time"] = json!(guest.time.as_secs_f64());
        }
        if let Some(error) = self.failure() {
            status = "failed";
            answer["error"] = json!(error);
        }
        if let Some(time) = self.start_time.get() {
            answer["start-time"] = json!(time.as_secs_f64());
        }
        answer["status"] = json!(status);
        answer
    }
}

/// What the pager tells a [`Restored`].
pub struct Told(pub Arc<Restored>);

impl OwnEvents for Told {
    fn completed(&self) {
        self.0.bus.emit(&X_STERNA_RESTORE, Some(json!({"status": "completed"})));
    }

    fn given_up(&self, why: &GuestError) {
        let restored = &self.0;
        let text = format!("{why}; the guest was stopped and cannot continue: end it with `quit`");
        if restored.failure.set(text.clone()).is_err() {
            return;
        }
        terminal::note(&format!("sterna: error: {text}"));
        restored.bus.emit(&X_STERNA_RESTORE, Some(json!({"status": "failed", "error": text})));
        let Some(control) = restored.control.get().and_then(Weak::upgrade) else { return };
        // A vCPU that waits for the page leaves the guest at the request. A thread that touches the page outside of the guest
        // waits without end, and the stop with it. The pager must not wait for either.
        let stop = move || {
            if let Err(error) = control.stop() {
                terminal::note(&format!("sterna: error: the guest could not be stopped: {error}"));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("restore-failed".to_owned()).spawn(stop) {
            terminal::note(&format!("sterna: error: the guest could not be stopped: {error}"));
        }
    }
}
