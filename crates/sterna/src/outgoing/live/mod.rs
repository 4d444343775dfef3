//! Live saves: the state of one moment is saved, and the guest is paused only for that moment.
//!
//! | module | contains |
//! | --- | --- |
//! | `save` | the steps |
//! | `held` | write protection: memory keeps the content of the moment until it is copied |
//! | `pages` | sends pages, copies for writers first |
//! | `options` | what a save takes and returns |
//! | `changes` | [`ChangeLog`]: the pages that changed since an earlier save |
//! | `target` | a connection or a file |
//!
//! The result is the stream of a migration to a file. Any reader of such streams loads it, also another VM that waits for a
//! guest: it gets a copy, while the guest runs here.

mod changes;
mod held;
mod options;
mod pages;
mod save;
mod shared;
mod target;

use std::sync::Arc;
use std::time::Duration;

use sterna_ram::Custody;
use sterna_transport::Address;

pub use changes::ChangeLog;
pub use options::{LiveSaveOptions, LiveSaved, Snapshot};

use super::check::check;
use crate::bell::EventFd;
use crate::error::MigrationError;
use crate::events::{Observer, Status};
use crate::params::{Capabilities, Parameters};
use crate::rules::Feature;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::stats::Statistics;
use crate::threads::{self, ThreadRole, call, hooked, tried};
use crate::vm::SourceVm;
use shared::Shared;

/// A save of a guest that continues to run. Cloning gives another handle; dropping all handles does not end it.
///
/// The image is the guest's state at one moment. The guest is paused for that moment, while its devices are saved. Its memory
/// is write-protected before, and written to the target afterwards; a page that the guest writes meanwhile is copied first.
///
/// The VM's callbacks are those of a migration, but hooks are not called: disks and locks stay with this guest. The target
/// must not use them at the same time.
#[derive(Clone)]
pub struct LiveSave {
    shared: Arc<Shared>,
}

impl LiveSave {
    /// Starts to save the guest of `vm` to `to`, and returns immediately.
    ///
    /// If a server of this process still has pages of the guest ([`GuestRam::complete`](sterna_ram::GuestRam::complete)), it
    /// places all of them first, while the guest runs.
    ///
    /// After every end, also after a failure or a cancel, the guest runs if it ran before, nothing is protected, and a
    /// file at `to` is complete or absent.
    ///
    /// # Errors
    /// * [`StartError::Settings`]: settings exclude a live save, the guest's writes cannot be held
    ///   ([`SourceVm::may_hold_writes`]), or a device has a stream.
    /// * [`StartError::Guest`], [`StartError::Tracked`]: a migration or another save has the guest or its dirty source.
    pub fn start(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        options: LiveSaveOptions,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        check(to, &params, &capabilities, |features| features.with(Feature::LiveSave, true))?;
        if !call("SourceVm::may_hold_writes", || vm.may_hold_writes()) {
            return Err(SettingsError::CannotHoldWrites.into());
        }
        let devices = call("Vm::devices", || vm.devices());
        if let Some(device) = devices.iter().find(|device| device.stream().is_some()) {
            return Err(SettingsError::LiveSaveExcludesDevice { device: device.name() }.into());
        }
        let ram = call("Vm::ram", || vm.ram());
        let pages = ram.poisoned();
        if !pages.is_empty() {
            return Err(StartError::Poisoned { pages });
        }
        let leaving = Custody::Leaving { is_free: true };
        let custody = ram.claim_custody(leaving, Custody::may_leave).map_err(StartError::Guest)?;
        let tracking = match &options.changes {
            Some(snapshot) if snapshot.log.has_ended() => return Err(StartError::Tracked),
            Some(snapshot) if snapshot.log.is_of(&ram) => None,
            Some(_) => return Err(StartError::Guest(Custody::Replaced)),
            None => Some(ram.claim_tracking().ok_or(StartError::Tracked)?),
        };
        let hook = params.on_thread_start.clone();
        let shared = Shared::new((vm, ram), to.clone(), (params, options), observer, (custody, tracking));
        let shared = Arc::new(shared);
        let [saving, dying] = [0, 1].map(|_| Arc::clone(&shared));
        let work = move || {
            saving.status(Status::Setup);
            let saved = tried("the live save", || save::save(&saving));
            saving.end(saved);
        };
        let spawn = || threads::spawn(ThreadRole::LiveSave, work, move |error| dying.end(Err(error)));
        hooked(hook.as_ref(), spawn).map_err(StartError::system)?;
        Ok(Self { shared })
    }

    /// The status at this moment. [`Status::Completed`] means that the image is complete; the guest is still here.
    pub fn status(&self) -> Status {
        self.shared.now()
    }

    /// The statistics at this moment. The downtime is the pause.
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// Cancels the save. False: it has ended before.
    pub fn cancel(&self) -> bool {
        self.shared.cancel()
    }

    /// Changes parameters of the running save. [`Parameters`] lists those that are live; of these, only
    /// `max_bandwidth_bytes` has an effect.
    ///
    /// # Errors
    /// [`SettingsError::NotLive`] if `change` changes another parameter. Then no parameter is changed.
    pub fn set_live(&self, change: impl FnOnce(&mut Parameters)) -> Result<(), SettingsError> {
        self.shared.change_params(|params| {
            let mut wanted = params.clone();
            change(&mut wanted);
            *params = wanted.for_running(params)?;
            Ok(())
        })
    }

    /// The result; `None` before the end.
    pub fn result(&self) -> Option<Result<LiveSaved, MigrationError>> {
        self.shared.result()
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// [`MigrationError`]: there is no image, and the guest runs as before.
    pub fn wait(&self) -> Result<LiveSaved, MigrationError> {
        let ended = self.shared.wait(None);
        ended.unwrap_or_else(|| Err(MigrationError::Internal("a live save that has not ended".to_owned())))
    }

    /// Waits for the end, at most for `limit`; `None` if it has not ended.
    pub fn wait_timeout(&self, limit: Duration) -> Option<Result<LiveSaved, MigrationError>> {
        self.shared.wait(Some(limit))
    }

    /// A descriptor that becomes readable at each event and at the end, for a VMM with an event loop.
    ///
    /// # Errors
    /// The kernel gives no further eventfd.
    pub fn event_fd(&self) -> std::io::Result<EventFd> {
        self.shared.bell.listener()
    }
}
