//! Postcopy at the destination: a guest that runs here while pages are missing (specs/postcopy.md).
//!
//! Until LISTEN, memory arrives as in any migration. Then the pages that did not arrive, or have changed since,
//! are unmapped, so that a thread that touches one blocks.
//! A separate thread loads the devices, because loading may touch such a page. The loader continues to read the
//! main channel, and places pages. Another thread requests the pages that threads wait for.
//!
//! | module | contains |
//! | --- | --- |
//! | `faults` | requests the pages that threads wait for |
//! | `package` | the devices, and RUN |
//! | `preempt` | the preempt channel, which carries requested pages |
//! | `recovery` | continues over another connection after a loss |
//!
//! The state that these modules share is in [`super::arriving`].

mod faults;
mod package;
pub(super) mod preempt;
pub(super) mod recovery;

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::destination::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_ram::missing_pages::{MissingPages, MissingPagesError, TakenAhead};
use sterna_transport::Channel;
use sterna_wire::extension;
use sterna_wire::main::MainItem;
use sterna_wire::return_path::ReturnMessage;

use super::arriving::{ArrivingPages, Commands};
use super::shared::Shared;
use super::target::Target;
use crate::error::{MachineDifference, MigrationError, Untimely};
use crate::events::Event;
use crate::pages::RamSink;
use crate::params::Capabilities;
use crate::postcopy::page_sizes;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::threads::{self, ThreadRole, caught};

/// Checks whether this side can take a guest whose pages arrive later.
pub(super) fn check(target: &dyn Target, capabilities: &Capabilities) -> Result<(), StartError> {
    check_target(target, capabilities)?;
    if capabilities.postcopy_ram { probe().map_err(StartError::Postcopy) } else { Ok(()) }
}

/// Checks whether this host and this process can block accesses to missing pages.
///
/// A sandbox must permit the system calls of the probe to the calling thread.
pub(super) fn probe() -> Result<(), Arc<MissingPagesError>> {
    MissingPages::probe().map_err(Arc::new)
}

/// As [`check`], where [`probe`] has succeeded before. Makes no system call.
pub(super) fn check_target(target: &dyn Target, capabilities: &Capabilities) -> Result<(), StartError> {
    if !capabilities.postcopy_ram {
        return Ok(());
    }
    if !target.can_run_early() {
        return Err(SettingsError::PostcopyExcludes { what: "a guest that does not arrive in a VM" }.into());
    }
    if let Some(device) = target.shares_ram_with() {
        return Err(SettingsError::PostcopyExcludesDevice { device }.into());
    }
    let Some(ram) = target.guest() else { return Ok(()) };
    MissingPages::check(ram).map_err(|error| StartError::Postcopy(Arc::new(error)))
}

/// Handles ADVISE: this side must be able to run postcopy, with the same page sizes as the source.
pub(super) fn advised(shared: &Shared, host: u64, target: u64) -> Result<(), MigrationError> {
    shared.postcopy.commands.lock().advised(shared.ram_has_begun())?;
    let Some(ram) = shared.target.guest() else {
        return Err(MigrationError::Internal("postcopy without a guest's memory".to_owned()));
    };
    let ours = page_sizes(ram);
    if (host, target) == (ours, PAGE_SIZE as u64) {
        return Ok(());
    }
    Err(MachineDifference::PageSizes { host, target, ours, ours_target: PAGE_SIZE as u64 }.into())
}

/// Handles DISCARD: pages of a block have changed since they arrived, or did not arrive.
pub(super) fn discard(
    shared: &Shared,
    block: usize,
    name: &str,
    ranges: &[(u64, u64)],
) -> Result<(), MigrationError> {
    shared.postcopy.commands.lock().discards()?;
    shared.report(Fed::PostcopyBegins);
    let sink = sink(shared)?;
    let ram = sink.ram();
    let (length, unit) = (ram.block(block).len_bytes(), ram.block(block).page_bytes());
    let mut ahead = shared.postcopy.ahead.lock();
    for (start, bytes) in ranges.iter().copied() {
        let end = start.saturating_add(bytes);
        if end > length || !start.is_multiple_of(unit) || !end.is_multiple_of(unit) {
            let (block, block_bytes, page_bytes) = (name.to_owned(), length, unit);
            return Err(Untimely::Discard { block, start, length: bytes, block_bytes, page_bytes }.into());
        }
        let (first, count) = (start / PAGE_SIZE as u64, bytes / PAGE_SIZE as u64);
        sink.forget(block, first, count);
        // The guest may still run at the source. Unmapping now shortens the time in which it is paused.
        if count > 0 {
            ahead.get_or_insert_with(|| TakenAhead::new(ram)).take_away(block, first, count)?;
        }
    }
    Ok(())
}

/// The sink that writes into the guest's memory.
fn sink(shared: &Shared) -> Result<&RamSink, MigrationError> {
    let missing = || MigrationError::Internal("postcopy without a guest's memory".to_owned());
    shared.target.ram_sink().ok_or_else(missing)
}

/// Handles LISTEN: from now on a thread that touches a missing page waits for it.
pub(super) fn listen(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    shared.postcopy.commands.lock().listens()?;
    shared.report(Fed::PostcopyBegins);
    let preempt = match shared.capabilities.postcopy_preempt {
        true => Some(preempt::await_channel(shared)?),
        false => None,
    };
    shared.rounds.end_precopy()?;
    let sink = sink(shared)?;
    let measures = shared.capabilities.postcopy_blocktime;
    let lanes = lanes_that_follow(shared);
    let ahead = shared.postcopy.ahead.lock().take();
    let arriving = ArrivingPages::begin(sink.ram(), sink.received(), ahead.as_ref(), measures, lanes)?;
    let arriving = Arc::new(arriving);
    shared.postcopy.set_arriving(&arriving);
    if lanes > 0 {
        shared.rounds.follow();
    }
    shared.postcopy.asking.lock().open();
    shared.postcopy.keep_fault_thread(faults::spawn(shared, &arriving)?);
    match preempt {
        Some(channel) => receive_requested(shared, channel, arriving),
        None => Ok(()),
    }
}

/// Starts the thread that places pages of the preempt channel.
fn receive_requested(
    shared: &Arc<Shared>,
    channel: Arc<Channel>,
    arriving: Arc<ArrivingPages>,
) -> Result<(), MigrationError> {
    spawn(shared, ThreadRole::PreemptChannel, move |shared| preempt::receive(shared, &channel, &arriving))
}

/// Number of lanes that may carry pages while the guest runs: all lanes of a Sterna source that knows this
/// side's features, otherwise 0.
fn lanes_that_follow(shared: &Shared) -> usize {
    let is_sterna = shared.secret.lock().is_some();
    if is_sterna { shared.places.lanes() } else { 0 }
}

/// Handles the package. Another thread loads its devices.
pub(super) fn take_package(shared: &Arc<Shared>, items: Vec<MainItem>) -> Result<(), MigrationError> {
    let items = package::check(items)?;
    listen(shared)?;
    spawn(shared, ThreadRole::Package, move |shared| package::load(shared, items))
}

/// The error for an element that the source must not send after LISTEN.
pub(super) fn unfit() -> MigrationError {
    Untimely::AfterListen.into()
}

/// Starts a thread that ends when loading ends.
fn spawn(
    shared: &Arc<Shared>,
    role: ThreadRole,
    work: impl FnOnce(&Arc<Shared>) -> Result<(), MigrationError> + Send + 'static,
) -> Result<(), MigrationError> {
    let (theirs, died) = (Arc::clone(shared), Arc::clone(shared));
    let work = move || {
        if let Err(error) = work(&theirs) {
            theirs.fail(error);
        }
        theirs.nudge();
    };
    let thread = threads::spawn(role, work, move |error| died.fail(error))?;
    shared.postcopy.keep_thread(thread);
    Ok(())
}

/// The source requests a message when the guest was started.
pub(super) fn asked_for_start(shared: &Shared) -> Result<(), MigrationError> {
    if *shared.postcopy.commands.lock() != Commands::Running {
        return Err(Untimely::StartQuestion.into());
    }
    say_started(shared, shared.postcopy.is_asked_for_start())
}

/// The guest was started, or taken over paused: tells the source if it has requested this.
pub(super) fn has_started(shared: &Shared) -> Result<(), MigrationError> {
    say_started(shared, shared.postcopy.has_started())
}

/// Asks the VMM for the vCPUs' threads, if waiting times are measured.
pub(super) fn name_vcpus(shared: &Shared) {
    if let Some(blocktime) = shared.postcopy.arriving().and_then(|arriving| arriving.blocktime()) {
        let asked = caught("TargetVm::threads_of_vcpus", || shared.target.threads_of_vcpus());
        match asked {
            Ok(threads) => blocktime.name_vcpus(&threads),
            Err(error) => shared.tell(&Event::Warning(error.to_string())),
        }
    }
}

fn say_started(shared: &Shared, is_due: bool) -> Result<(), MigrationError> {
    if is_due { shared.say(&ReturnMessage::Pong(extension::POSTCOPY_STARTED_PING)) } else { Ok(()) }
}

/// Interval at which waiting threads check for progress.
pub(super) const LOOK: Duration = Duration::from_millis(50);
