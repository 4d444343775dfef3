//! Postcopy: the guest resumes at the destination, and its pages follow (specs/postcopy.md).

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Cause, Event as Fed, Refusal, Source};
use sterna_ram::{DirtyBitmaps, PAGE_SIZE};
use sterna_transport::Channel;
use sterna_wire::extension::{self, Features, PreemptHello, ReconnectChannel};
use sterna_wire::main::{Command, encode_end};

use super::Control;
use crate::error::MigrationError;
use crate::events::{Event, SwitchoverStep};
use crate::identity;
use crate::interruption::Break;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::postcopy::Background;
use crate::outgoing::postcopy::package::{discards, package, round_up};
use crate::outgoing::postcopy::recovery::say_hello;
use crate::outgoing::postcopy::sender::PageSender;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::params::Parameters;
use crate::postcopy::answers::PACKAGE_PING;
use crate::postcopy::page_sizes;
use crate::threads::call;
use crate::vm::RunState;

/// The longest wait of the background before it checks for other work.
const PATIENCE: Duration = Duration::from_millis(20);

/// The limit for waiting until the channels are empty, while the guest runs.
const EMPTYING: Duration = Duration::from_secs(1);
/// After this time an operator is informed why the guest has not been switched.
const LONG_AWAITED: Duration = Duration::from_secs(5);
/// At most this number of pages is dropped in negligible time.
const FEW_PAGES: u64 = 32;
/// The interval at which empty channels are checked.
const LOOK: Duration = Duration::from_millis(1);

impl Control {
    /// Tells the destination that postcopy may follow.
    ///
    /// The destination must support it. A refusal comes while the guest still runs here.
    pub(super) fn advise_postcopy(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        if !shared.capabilities.postcopy_ram {
            return Ok(());
        }
        let peer = shared.driver.inspect(Source::peer);
        if peer.sterna {
            check_peer(Features(peer.features), shared.capabilities.postcopy_preempt)?;
        }
        let sizes = page_sizes(&shared.guest.ram);
        self.transfer.main()?.commands(&[Command::PostcopyAdvise(Some((sizes, PAGE_SIZE as u64)))])
    }

    /// Requests the switch, if an operator or the policy wants it. True: the guest is about to be stopped.
    pub(super) fn switch_if_wanted(&mut self) -> Result<bool, Break> {
        let shared = Arc::clone(&self.shared);
        if !shared.postcopy.is_wanted() {
            return Ok(false);
        }
        if let Some(device) = self.transfer.streams.as_ref().and_then(DeviceStreams::unread) {
            self.tell_what_is_awaited(&device);
            return Ok(false);
        }
        self.transfer.pacing.hints.stop();
        if shared.capabilities.postcopy_preempt && self.switch.preempt.is_none() {
            self.switch.preempt = Some(connect_preempt(&shared, self.reconnecting.session)?);
        }
        let guest_running = call("SourceVm::run_state", || shared.guest.vm.run_state()) == RunState::Running;
        match shared.feed(Fed::PostcopyRequested { guest_running }) {
            Ok(()) => {
                // Lanes stop after their current chunk, before the guest stops.
                shared.session.limiter.open();
                self.transfer.rounds()?.latest().iter().for_each(|round| round.abandon());
                Ok(true)
            }
            // Precopy continues until the destination is ready.
            Err(Refusal::AcknowledgementsMissing { .. }) => Ok(false),
            Err(refusal) => Err(MigrationError::Internal(refusal.to_string()).into()),
        }
    }

    /// Requests the switch after the operator's limit of time or rounds for precopy.
    pub(super) fn want_switch_if_due(&self) {
        let shared = &self.shared;
        if !shared.capabilities.postcopy_ram || shared.postcopy.is_wanted() {
            return;
        }
        let Parameters { postcopy_after: time, postcopy_after_rounds: rounds, .. } = shared.params();
        let (clock, begun) = {
            let statistics = shared.measures.statistics.lock();
            (statistics.clock(), statistics.rounds_begun)
        };
        if !time.is_zero() && clock >= time || rounds > 0 && begun > u64::from(rounds) {
            shared.postcopy.want();
        }
    }

    /// Warns once if the switch has waited long for `device`.
    ///
    /// The device is read while the guest runs, to keep the pause short.
    fn tell_what_is_awaited(&mut self, device: &str) {
        let began = *self.switch.awaited_since.get_or_insert_with(Instant::now);
        if !self.switch.is_told && began.elapsed() >= LONG_AWAITED {
            self.switch.is_told = true;
            let text = format!(
                "the switch to postcopy waits: {device} is still being read while the guest runs, and would stand in the pause"
            );
            self.shared.tell(&Event::Warning(text));
        }
    }

    /// Waits until all channels are empty before the guest stops, at most [`EMPTYING`].
    ///
    /// Lanes have then sent their current chunk, and the network has delivered it. Otherwise the messages of the
    /// stopped guest would queue after that data.
    pub(super) fn let_channels_run_empty(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(rounds) = self.transfer.rounds.as_ref().filter(|_| self.is_postcopy()) else { return };
        // Some lanes do not begin a round before the previous one was flushed.
        let flushed = shared.session.lanes.queue.last_flushed();
        let rounds = rounds.latest();
        let unflushed = rounds.iter().map(|round| round.number()).filter(|&number| number > flushed).min();
        let channels = self.transfer.channels();
        let is_empty = || {
            let is_sent = unflushed.is_none_or(|number| shared.session.lanes.are_through(number));
            is_sent && channels.iter().all(|channel| channel.outstanding_bytes() == 0)
        };
        let until = Instant::now() + EMPTYING;
        // An interruption ends the migration. The guest must be stopped first in any case, before it is resumed.
        while !is_empty() && Instant::now() < until {
            if self.transfer.waits.at_most(LOOK, || None::<()>).is_err() {
                return;
            }
        }
    }

    /// Names the pages that a Sterna destination drops, while the guest still runs.
    ///
    /// Dropping takes long if the guest's writes are scattered. Most of these pages are known before the guest
    /// stops. Each further pass names the pages that were written meanwhile, as long as their number decreases.
    pub(super) fn name_what_is_dropped(&mut self) -> Result<(), Break> {
        self.switch.dropped = None;
        let shared = Arc::clone(&self.shared);
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        if self.transfer.rounds.is_none() || !self.is_postcopy() || !is_sterna {
            return Ok(());
        }
        self.flush_rounds()?;
        let (until, mut before) = (Instant::now() + EMPTYING, u64::MAX);
        let mut dropped = DirtyBitmaps::new(&shared.guest.ram);
        loop {
            self.transfer.sync()?;
            let mut rest = self.transfer.rounds()?.unsent();
            round_up(&shared.guest.ram, &rest);
            rest.drop_reported(&dropped);
            let count = rest.count();
            if count <= FEW_PAGES || count >= before || Instant::now() >= until {
                break;
            }
            before = count;
            let main = self.transfer.main()?;
            main.commands(&discards(&shared.guest.ram, &rest))?;
            dropped.or_from(&rest);
            // The destination has dropped the pages when it answers.
            shared.measures.probes.lock().send_keepalive();
            main.commands(&[Command::Ping(extension::KEEPALIVE_PING)])?;
            self.transfer.waits.was_not_silent();
            self.transfer
                .waits
                .at_most(EMPTYING, || shared.measures.probes.lock().are_answered().then_some(()))?;
        }
        self.switch.dropped = Some(dropped);
        Ok(())
    }

    /// Performs `SendFinalState` of postcopy: names the pages that the destination drops, then sends the devices.
    pub(super) fn send_final_state_of_postcopy(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.transfer.main()?);
        // Pages of these rounds that are not sent yet follow the guest.
        self.transfer.rounds()?.leave_unfinished(Duration::ZERO);
        self.transfer.rounds()?.open_last();
        if let Some(streams) = &self.transfer.streams {
            streams.finish();
        }
        self.flush_rounds()?;
        self.transfer.sync()?;
        self.transfer.step(SwitchoverStep::LastSync);
        // Pages that were not sent, or were written since.
        let unsent = self.transfer.rounds()?.unsent();
        round_up(&shared.guest.ram, &unsent);
        let mut rest = DirtyBitmaps::new(&shared.guest.ram);
        rest.or_from(&unsent);
        if let Some(dropped) = &self.switch.dropped {
            rest.drop_reported(dropped);
        }
        self.transfer.step(SwitchoverStep::LastPages);
        self.send_streams()?;
        self.end_rounds();
        MigrationError::check_memory(&shared.guest.ram)?;
        let sections = self.collect_devices()?;
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        self.switch.package = package(&sections, is_sterna)?;
        self.transfer.step(SwitchoverStep::Devices);
        main.with(|stream| {
            stream.forget_block();
            shared.guest.source.send_switchover_start(stream)?;
            stream.commands(&discards(&shared.guest.ram, &rest))
        })?;
        shared.postcopy.begin(&shared.guest.ram, &unsent);
        self.answer_requests(&main)?;
        MigrationError::check_same_ram(&call("Vm::ram", || shared.guest.vm.ram()), &shared.guest.ram)?;
        // For a QEMU this is the commit.
        MigrationError::check_memory(&shared.guest.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    /// Stops the lanes: they send no more pages or chunks before the guest runs.
    fn end_rounds(&self) {
        let shared = &self.shared;
        let peer = shared.driver.inspect(Source::peer);
        let takes_lanes = peer.sterna && Features(peer.features).contains(Features::POSTCOPY_LANES);
        if shared.capabilities.multifd && takes_lanes {
            shared.postcopy.keep_lanes();
        }
        shared.session.lanes.queue.end();
    }

    /// Sends the rest of the device streams. The destination loads them before it prepares, and needs no page for
    /// that.
    fn send_streams(&mut self) -> Result<(), Break> {
        let main = self.transfer.main()?;
        let Some(streams) = &self.transfer.streams else { return Ok(()) };
        match streams.on_lanes() {
            Some(_) => streams.await_lanes(&mut self.transfer.waits)?,
            None => streams.send_in_turn(&mut self.transfer.waits, &main)?,
        }
        self.transfer.step(SwitchoverStep::Streams);
        Ok(())
    }

    /// Writes the flushes of rounds that lanes have left.
    fn flush_rounds(&mut self) -> Result<(), Break> {
        let flushed = self.shared.session.lanes.queue.last_flushed();
        let rounds = self.transfer.rounds()?.latest();
        rounds
            .iter()
            .filter(|round| round.number() > flushed)
            .try_for_each(|round| self.transfer.run_dry(round))
    }

    fn collect_devices(&mut self) -> Result<Vec<u8>, MigrationError> {
        let (shared, run_state) = (Arc::clone(&self.shared), self.transfer.run_state_before());
        let mut collector = self.transfer.main()?.with(|stream| Ok(stream.device_collector()))?;
        let collected = collector.collect(|stream| shared.guest.source.send_devices(stream, run_state))?;
        Ok(collected.sections)
    }

    /// Sends the package with the devices. Pages that the destination needs to load them are sent meanwhile.
    pub(super) fn send_package(&mut self) -> Result<(), MigrationError> {
        let package = std::mem::take(&mut self.switch.package);
        self.transfer.main()?.with(|stream| {
            stream.send(|out| {
                Command::Ping(PACKAGE_PING).encode(out)?;
                // The package was compared with the size limit when it was made.
                Command::Packaged(package.len() as u32).encode(out)?;
                out.extend_from_slice(&package);
                Ok(())
            })
        })?;
        self.transfer.waits.was_not_silent();
        Ok(())
    }

    /// Performs `SendRun`. The machine has committed, so the guest stays stopped even if this fails.
    pub(super) fn send_run(&mut self) {
        self.transfer.step(SwitchoverStep::Prepare);
        let is_sterna = self.shared.driver.inspect(Source::peer).sterna;
        let sent = match is_sterna {
            true => self.transfer.main().and_then(|main| {
                main.commands(&[Command::PostcopyRun, Command::Ping(extension::POSTCOPY_STARTED_PING)])
            }),
            false => self.send_package(),
        };
        match sent {
            Ok(()) => self.shared.report(Fed::EofSent),
            Err(error) => {
                self.shared.note_error(error);
                self.shared.report(Fed::EofFailed);
            }
        }
    }

    /// Performs `SendPages`: sends pages until none is left.
    pub(super) fn send_pages(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.transfer.main()?);
        if !self.has_recovered() {
            self.transfer.note_start();
        }
        {
            let mut statistics = shared.measures.statistics.lock();
            let now = shared.measures.counters.now();
            statistics.at_start.get_or_insert(now);
            statistics.begin_postcopy();
            statistics.following_bytes = shared.postcopy.left_bytes();
            (statistics.round, statistics.next_round_bytes) = (None, 0);
        }
        let Some(sender) = self.switch.page_sender.clone() else {
            return Err(MigrationError::Internal("pages follow, and nobody sends them".to_owned()).into());
        };
        let has_lanes = shared.postcopy.has_lanes() && !self.transfer.carrier()?.multifd().is_empty();
        if has_lanes {
            self.await_lanes()?;
        } else {
            self.send_background(&sender)?;
        }
        shared.postcopy.ends();
        shared.measures.statistics.lock().has_sent_all();
        shared.report(Fed::PagesSent);
        sender.close_preempt();
        main.with(|stream| {
            if has_lanes {
                stream.ram_part(false, true)?;
            }
            stream.ram_part(true, false)?;
            stream.send(|out| {
                encode_end(out);
                Ok(())
            })
        })?;
        self.transfer.carrier()?.say_goodbye();
        Ok(())
    }

    /// Starts the thread that sends requested pages.
    pub(super) fn answer_requests(&mut self, main: &Arc<MainChannel>) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let counters = Arc::clone(&shared.measures.counters);
        let sender = PageSender::new(shared.guest.ram.clone(), counters, main, self.switch.preempt.clone());
        self.switch.page_sender = Some(sender.clone());
        self.transfer.workers.spawn("requested pages", move || {
            if let Err(error) = sender.answer(&shared.postcopy) {
                shared.fail(error);
            }
        })
    }

    /// Sends background pages over the main channel, until all pages are sent.
    ///
    /// It also waits until all requested pages are sent.
    fn send_background(&mut self, sender: &PageSender) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (limiter, main) = (&shared.postcopy.limiter, self.transfer.main()?);
        loop {
            self.transfer.waits.until(|| (!limiter.is_spent()).then_some(()))?;
            let next = shared.postcopy.next_background(PATIENCE, sender.is_alone(), || sender.is_full());
            match next {
                Background::Run(run) => {
                    limiter.take(run.count * PAGE_SIZE as u64);
                    let bytes = sender.send(run)?;
                    shared.postcopy.work.sent_background(run.count, bytes);
                    if let Some(channel) = &main.channel {
                        shared.postcopy.pace.keep(0, channel);
                    }
                    let counts = shared.measures.counters.now();
                    let mut statistics = shared.measures.statistics.lock();
                    statistics.following_bytes = shared.postcopy.left_bytes();
                    statistics.observe(counts);
                    drop(statistics);
                    self.transfer.waits.was_not_silent();
                }
                Background::Wait => self.transfer.waits.idle(),
                Background::Done => return Ok(()),
            }
        }
    }

    /// Waits until lanes have sent the background pages and all requested pages are sent.
    fn await_lanes(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (postcopy, lanes) = (&shared.postcopy, shared.session.lanes.count());
        postcopy.let_lanes_begin();
        let is_done = || (postcopy.lanes_are_through(lanes) && postcopy.ends_if_answered()).then_some(());
        while self.transfer.waits.at_most(PATIENCE, is_done)?.is_none() {
            let left = postcopy.left_bytes();
            let mut statistics = shared.measures.statistics.lock();
            statistics.following_bytes = left;
            statistics.observe(shared.measures.counters.now());
        }
        shared.measures.statistics.lock().following_bytes = 0;
        Ok(())
    }

    /// The connection broke while the destination runs the guest: reports the paused postcopy.
    pub(super) fn report_paused(&mut self, cause: Cause) {
        if matches!(cause, Cause::OperatorPaused | Cause::DestinationFailed(_)) {
            // Errors of threads at the channels are only consequences of `cause`.
            self.shared.forget_error();
            self.shared.note_cause(cause);
        }
        let why = self.shared.error().map_or_else(|| format!("{cause:?}"), |error| error.to_string());
        self.shared.measures.statistics.lock().pause_postcopy(&why);
        let left = self.shared.postcopy.left_bytes() / PAGE_SIZE as u64;
        let text = format!(
            "postcopy-paused: the guest runs at the destination, and the connection broke ({why}). The guest waits there when \
             it needs a page that did not come; {left} pages were not sent, and some may have been lost on their way. Keep this \
             process: it alone has them. To go on, say migrate with resume here and, if the destination shall listen at another \
             address, migrate-recover there before. The guest does not run here any more. If it is complete there (query-migrate \
             says completed), this side completes when the destination answers its question; if nobody answers, or the guest \
             is lost, decide destination-runs"
        );
        self.shared.tell(&Event::Warning(text));
    }
}

/// Checks that a Sterna destination has the settings that postcopy needs.
fn check_peer(features: Features, wants_preempt: bool) -> Result<(), MigrationError> {
    let incompatible = |what: &str| Err(MigrationError::PeerIncompatible { what: what.to_owned() });
    if !features.contains(Features::POSTCOPY) {
        return incompatible(
            "postcopy-ram is on here and off at the destination: switch it on there, or off here",
        );
    }
    match (wants_preempt, features.contains(Features::PREEMPT)) {
        (true, false) => incompatible("postcopy-preempt is on here and off at the destination: set it alike"),
        (false, true) => incompatible("postcopy-preempt is off here and on at the destination: set it alike"),
        _ => Ok(()),
    }
}

/// Opens the channel of requested pages.
///
/// This side names the migration and the channel's session to a Sterna. Therefore the Sterna does not accept a
/// late channel of an earlier session as the present one.
fn connect_preempt(shared: &Shared, session: u32) -> Result<Arc<Channel>, MigrationError> {
    let params = shared.params();
    let setup = params.limits.setup;
    let channel = Channel::connect_with(
        &shared.session.to,
        params.tls.as_ref(),
        setup,
        &shared.session.connecting,
        |channel| {
            channel.set_stall_limit(Some(params.limits.stall));
            shared.adopt(channel)
        },
    )?;
    let identity = &shared.handover.identity;
    if session > 0 {
        say_hello(&channel, identity, (session, ReconnectChannel::Preempt), identity::nonce()?)?;
    } else if shared.driver.inspect(Source::peer).sterna {
        let mut hello = Vec::new();
        PreemptHello::new(identity.id, &identity.secret, &channel.tls_binding()).encode(&mut hello);
        channel.write_all(&hello)?;
    }
    Ok(channel)
}

impl Shared {
    /// Handles the destination's report that it has started the guest.
    ///
    /// A Sterna reports it when asked, a QEMU when the devices are loaded.
    pub(in crate::outgoing) fn destination_started(&self) -> Result<(), MigrationError> {
        let is_due = self.driver.inspect(|machine| machine.is_postcopy() && machine.state().is_committed());
        if !is_due {
            let what = "it said that the guest was started, and nobody had told it to".to_owned();
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.measures.statistics.lock().acknowledged.get_or_insert_with(std::time::Instant::now);
        self.report(Fed::DestinationStarted);
        Ok(())
    }
}
