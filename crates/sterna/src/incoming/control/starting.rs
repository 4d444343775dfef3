//! Starts the guest, or takes it over paused, and announces it.
//!
//! In postcopy these callbacks may wait for a page, because the VMM touches guest memory or waits for a vCPU
//! that does. If the connection breaks meanwhile, the control thread must be free to accept another one.
//! Therefore the callbacks run one after the other on a separate thread. The machine learns the result of each.

use std::sync::Arc;
use std::thread::JoinHandle;

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_ram::Custody;

use super::Control;
use crate::driver::Driver;
use crate::error::MigrationError;
use crate::events::Event;
use crate::incoming::postcopy;
use crate::incoming::shared::Shared;
use crate::threads::{self, ThreadRole, tried};

impl Control {
    pub(super) fn start_guest(&mut self) {
        let is_again = std::mem::replace(&mut self.start_was_tried, true);
        if !self.shared.gets_pages_later() {
            return start(&self.shared, is_again);
        }
        let begun =
            self.beside(ThreadRole::Start, move |shared| start(shared, is_again), Fed::GuestStartFailed);
        if let Err(error) = begun {
            has_failed(&self.shared, error);
        }
    }

    /// In postcopy: the guest was paused, must stay paused, or could not be started.
    pub(super) fn take_over_paused(&mut self) {
        self.taken_over = true;
        let work = |shared: &Arc<Shared>| {
            take_over(shared);
            postcopy::name_vcpus(shared);
            shared.report(Fed::GuestStarted);
        };
        // The result does not matter: no other side has the guest.
        if let Err(error) = self.beside(ThreadRole::TakeOver, work, Fed::GuestStarted) {
            self.shared.tell(&Event::Warning(error.to_string()));
            self.shared.report(Fed::GuestStarted);
        }
    }

    /// Without postcopy: once, before the source is informed. Without a return path there is no source to
    /// inform.
    pub(super) fn take_over_if_paused(&mut self, driver: &Driver<Destination>) {
        if self.taken_over || driver.inspect(Destination::state) != State::Paused {
            return;
        }
        self.taken_over = true;
        take_over(&self.shared);
        self.shared.guest_is(Custody::Arriving { is_free: true });
    }

    pub(super) fn announce(&mut self) {
        if !self.shared.gets_pages_later() {
            return announce(&self.shared);
        }
        let shared = Arc::clone(&self.shared);
        let work = move |_: &Arc<Shared>| announce(&shared);
        let begun = self.spawn_beside(ThreadRole::Announce, work, |_, _| {});
        if let Err(error) = begun {
            self.shared.tell(&Event::Warning(error.to_string()));
        }
    }

    /// Waits for the callbacks on the separate thread. Every page is in place, or no guest runs.
    pub(super) fn join_beside(&mut self) {
        if let Some(thread) = self.beside.take() {
            // An error of the join is ignored: a panic in the thread was already reported.
            let _ = thread.join();
        }
    }

    /// As [`Control::spawn_beside`]. If the engine's own code panics there, the machine is fed `after_panic`.
    fn beside(
        &mut self,
        role: ThreadRole,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
        after_panic: Fed,
    ) -> Result<(), MigrationError> {
        self.spawn_beside(role, work, move |shared, error| {
            shared.note_error(error);
            shared.report(after_panic);
        })
    }

    /// Runs `work` on a separate thread, after the work that was begun before.
    fn spawn_beside(
        &mut self,
        role: ThreadRole,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
        died: impl FnOnce(&Shared, MigrationError) + Send + 'static,
    ) -> Result<(), MigrationError> {
        let (shared, at_death) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let before = self.beside.take();
        let in_turn = move || {
            let _ = before.map(JoinHandle::join);
            work(&shared);
        };
        self.beside = Some(threads::spawn(role, in_turn, move |error| died(&at_death, error))?);
        Ok(())
    }
}

/// Starts the devices that have a stream, then the guest.
///
/// `is_again`: an earlier attempt failed, and no other side has the guest. A device that fails again is then
/// left out, because a guest without this device is better than no guest.
fn start(shared: &Arc<Shared>, is_again: bool) {
    let prepared = tried("TargetVm::prepare_start", || shared.target.prepare_start());
    let prepared = prepared.and_then(|()| if is_again { Ok(()) } else { shared.streams.check_run() });
    let started = prepared.and_then(|()| shared.target.keep_memory()).and_then(|()| {
        if shared.target.shares_memory() && shared.streams.has_devices() {
            shared.report(Fed::MemoryMayChange);
        }
        let devices = match is_again {
            true => {
                for error in shared.streams.run_devices_that_can() {
                    let text = format!("the guest runs without one of its devices: {error}");
                    shared.tell(&Event::Warning(text));
                }
                Ok(())
            }
            false => shared.streams.run_devices(),
        };
        let started = devices.and_then(|()| tried("TargetVm::start", || shared.target.start()));
        started.inspect_err(|_| {
            // The source may run the guest again, so no device of this side may run.
            for error in shared.streams.stop_devices() {
                shared.tell(&Event::Warning(error.to_string()));
            }
        })
    });
    match started {
        Ok(()) => {
            if shared.target.runs_guests() {
                shared.tell(&Event::Resumed);
            }
            postcopy::name_vcpus(shared);
            shared.report(Fed::GuestStarted);
        }
        Err(error) => has_failed(shared, error),
    }
}

fn has_failed(shared: &Shared, error: MigrationError) {
    *shared.start_error.lock() = Some(error.clone());
    shared.note_error(error);
    shared.report(Fed::GuestStartFailed);
}

fn take_over(shared: &Shared) {
    let warn = |error: &MigrationError| {
        shared.tell(&Event::Warning(format!("the guest has arrived and is paused, but: {error}")));
    };
    let _ = shared.target.keep_memory().inspect_err(warn);
    let _ = tried("TargetVm::take_over_paused", || shared.target.take_over_paused()).inspect_err(warn);
}

fn announce(shared: &Shared) {
    for hook in shared.target.hooks() {
        if let Err(error) = tried("Hook::announce", || hook.announce()) {
            shared.tell(&Event::Warning(format!("{} was not announced: {error}", hook.name())));
        }
    }
}
