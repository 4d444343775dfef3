//! The switch: the guest is stopped, and its devices and the list of missing pages go to the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Source};
use sterna_ram::DirtyBitmaps;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::enabled::Enabled;
use super::package::{discards, package, round_up};
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::interruption::Break;
use crate::outgoing::shared::Shared;
use crate::outgoing::switchover::Switchover;
use crate::outgoing::transfer::Transfer;
use crate::postcopy::answers::PACKAGE_PING;
use crate::threads::call;

/// The limit for waiting until the channels are empty, while the guest runs.
const EMPTYING: Duration = Duration::from_secs(1);
/// At most this number of pages is dropped in negligible time.
const FEW_PAGES: u64 = 32;
/// The interval at which empty channels are checked.
const LOOK: Duration = Duration::from_millis(1);

impl Switchover for Enabled {
    fn prepare_stop(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let_channels_run_empty(transfer);
        self.name_what_is_dropped(transfer)
    }

    /// Performs `SendFinalState` of postcopy: names the pages that the destination drops, then sends the devices.
    fn send_final_state(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), transfer.main()?);
        // Pages of these rounds that are not sent yet follow the guest.
        transfer.rounds()?.leave_unfinished(Duration::ZERO);
        transfer.rounds()?.open_last();
        if let Some(streams) = &transfer.streams {
            streams.finish();
        }
        flush_rounds(transfer)?;
        transfer.last_sync()?;
        transfer.step(SwitchoverStep::LastSync);
        // Pages that were not sent, or were written since.
        let unsent = transfer.rounds()?.unsent();
        round_up(&shared.guest.ram, &unsent);
        let mut rest = DirtyBitmaps::new(&shared.guest.ram);
        rest.or_from(&unsent);
        if let Some(dropped) = &self.dropped {
            rest.drop_reported(dropped);
        }
        transfer.step(SwitchoverStep::LastPages);
        send_streams(transfer)?;
        end_rounds(&shared);
        MigrationError::check_memory(&shared.guest.ram)?;
        let sections = collect_devices(transfer)?;
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        self.package = package(&sections, is_sterna)?;
        transfer.step(SwitchoverStep::Devices);
        main.with(|stream| {
            stream.forget_block();
            shared.guest.source.send_switchover_start(stream)?;
            stream.commands(&discards(&shared.guest.ram, &rest))
        })?;
        shared.postcopy.begin(&shared.guest.ram, &unsent);
        self.answer_requests(transfer, &main)?;
        MigrationError::check_same_ram(&call("Vm::ram", || shared.guest.vm.ram()), &shared.guest.ram)?;
        transfer.check_last_sync()?;
        // For a QEMU this is the commit.
        MigrationError::check_memory(&shared.guest.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    fn send_prepare(&mut self, transfer: &mut Transfer) -> Result<(), MigrationError> {
        self.send_package(transfer)
    }

    /// Performs `SendRun`. The machine has committed, so the guest stays stopped even if this fails.
    fn commit(&mut self, transfer: &mut Transfer) {
        transfer.step(SwitchoverStep::Prepare);
        let is_sterna = self.shared.driver.inspect(Source::peer).sterna;
        let sent = match is_sterna {
            true => transfer.main().and_then(|main| {
                main.commands(&[Command::PostcopyRun, Command::Ping(extension::POSTCOPY_STARTED_PING)])
            }),
            false => self.send_package(transfer),
        };
        match sent {
            Ok(()) => self.shared.report(Fed::EofSent),
            Err(error) => {
                self.shared.note_error(error);
                self.shared.report(Fed::EofFailed);
            }
        }
    }
}

impl Enabled {
    /// Names the pages that a Sterna destination drops, while the guest still runs.
    ///
    /// Dropping takes long if the guest's writes are scattered. Most of these pages are known before the guest
    /// stops. Each further pass names the pages that were written meanwhile, as long as their number decreases.
    fn name_what_is_dropped(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        self.dropped = None;
        let shared = Arc::clone(&self.shared);
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        if transfer.rounds.is_none() || !is_sterna {
            return Ok(());
        }
        flush_rounds(transfer)?;
        let (until, mut before) = (Instant::now() + EMPTYING, u64::MAX);
        let mut dropped = DirtyBitmaps::new(&shared.guest.ram);
        loop {
            transfer.sync()?;
            let mut rest = transfer.rounds()?.unsent();
            round_up(&shared.guest.ram, &rest);
            rest.drop_reported(&dropped);
            let count = rest.count();
            if count <= FEW_PAGES || count >= before || Instant::now() >= until {
                break;
            }
            before = count;
            let main = transfer.main()?;
            main.commands(&discards(&shared.guest.ram, &rest))?;
            dropped.or_from(&rest);
            // The destination has dropped the pages when it answers.
            shared.measures.probes.lock().send_keepalive();
            main.commands(&[Command::Ping(extension::KEEPALIVE_PING)])?;
            transfer.waits.was_not_silent();
            transfer
                .waits
                .at_most(EMPTYING, || shared.measures.probes.lock().are_answered().then_some(()))?;
        }
        self.dropped = Some(dropped);
        Ok(())
    }

    /// Sends the package with the devices. Pages that the destination needs to load them are sent meanwhile.
    fn send_package(&mut self, transfer: &mut Transfer) -> Result<(), MigrationError> {
        let package = std::mem::take(&mut self.package);
        transfer.main()?.with(|stream| {
            stream.send(|out| {
                Command::Ping(PACKAGE_PING).encode(out)?;
                // The package was compared with the size limit when it was made.
                Command::Packaged(package.len() as u32).encode(out)?;
                out.extend_from_slice(&package);
                Ok(())
            })
        })?;
        transfer.waits.was_not_silent();
        Ok(())
    }
}

/// Waits until all channels are empty before the guest stops, at most [`EMPTYING`].
///
/// Lanes have then sent their current chunk, and the network has delivered it. Otherwise the messages of the
/// stopped guest would queue after that data.
fn let_channels_run_empty(transfer: &mut Transfer) {
    let shared = Arc::clone(&transfer.shared);
    let Some(rounds) = transfer.rounds.as_ref() else { return };
    // Some lanes do not begin a round before the previous one was flushed.
    let flushed = shared.session.lanes.queue.last_flushed();
    let rounds = rounds.latest();
    let unflushed = rounds.iter().map(|round| round.number()).filter(|&number| number > flushed).min();
    let channels = transfer.channels();
    let is_empty = || {
        let is_sent = unflushed.is_none_or(|number| shared.session.lanes.are_through(number));
        is_sent && channels.iter().all(|channel| channel.outstanding_bytes() == 0)
    };
    let until = Instant::now() + EMPTYING;
    // An interruption ends the migration. The guest must be stopped first in any case, before it is resumed.
    while !is_empty() && Instant::now() < until {
        if transfer.waits.at_most(LOOK, || None::<()>).is_err() {
            return;
        }
    }
}

/// Stops the lanes: they send no more pages or chunks before the guest runs.
fn end_rounds(shared: &Shared) {
    let peer = shared.driver.inspect(Source::peer);
    let takes_lanes = peer.sterna && Features(peer.features).contains(Features::POSTCOPY_LANES);
    if shared.capabilities.multifd && takes_lanes {
        shared.postcopy.keep_lanes();
    }
    shared.session.lanes.queue.end();
}

/// Sends the rest of the device streams. The destination loads them before it prepares, and needs no page for
/// that.
fn send_streams(transfer: &mut Transfer) -> Result<(), Break> {
    let main = transfer.main()?;
    let Some(streams) = &transfer.streams else { return Ok(()) };
    match streams.on_lanes() {
        Some(_) => streams.await_lanes(&mut transfer.waits)?,
        None => streams.send_in_turn(&mut transfer.waits, &main)?,
    }
    transfer.step(SwitchoverStep::Streams);
    Ok(())
}

/// Writes the flushes of rounds that lanes have left.
fn flush_rounds(transfer: &mut Transfer) -> Result<(), Break> {
    let flushed = transfer.shared.session.lanes.queue.last_flushed();
    let rounds = transfer.rounds()?.latest();
    rounds.iter().filter(|round| round.number() > flushed).try_for_each(|round| transfer.run_dry(round))
}

fn collect_devices(transfer: &mut Transfer) -> Result<Vec<u8>, MigrationError> {
    let (shared, run_state) = (Arc::clone(&transfer.shared), transfer.run_state_before());
    let mut collector = transfer.main()?.with(|stream| Ok(stream.device_collector()))?;
    let collected = collector.collect(|stream| shared.guest.source.send_devices(stream, run_state))?;
    Ok(collected.sections)
}
