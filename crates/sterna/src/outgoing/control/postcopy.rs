//! Postcopy: the guest goes on at the destination, and its pages follow (specs/postcopy.md).

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

/// For so long the background waits before it is looked whether something else is to be done.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long the channels may take to run empty, while the guest runs.
const EMPTYING: Duration = Duration::from_secs(1);
/// After so long an operator may wonder why the guest was not switched.
const LONG_AWAITED: Duration = Duration::from_secs(5);
/// So few pages are dropped in no time.
const FEW_PAGES: u64 = 32;
/// How often it is looked whether they have.
const LOOK: Duration = Duration::from_millis(1);

impl Control {
    /// Tells the destination that postcopy may come. It must be able to do it: that is found out while the guest runs here.
    pub(super) fn advise_postcopy(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        if !shared.capabilities.postcopy_ram {
            return Ok(());
        }
        let peer = shared.driver.inspect(Source::peer);
        if peer.sterna {
            check_peer(Features(peer.features), shared.capabilities.postcopy_preempt)?;
        }
        let sizes = page_sizes(&shared.ram);
        self.main()?.commands(&[Command::PostcopyAdvise(Some((sizes, PAGE_SIZE as u64)))])
    }

    /// Requests the switch, if an operator or the policy wants it. True: the guest is about to be stopped.
    pub(super) fn switch_if_wanted(&mut self) -> Result<bool, Break> {
        let shared = Arc::clone(&self.shared);
        if !shared.postcopy.is_wanted() {
            return Ok(false);
        }
        if let Some(device) = self.streams.as_ref().and_then(DeviceStreams::unread) {
            self.tell_what_is_awaited(&device);
            return Ok(false);
        }
        self.hints.stop();
        if shared.capabilities.postcopy_preempt && self.preempt.is_none() {
            self.preempt = Some(connect_preempt(&shared, self.reconnecting.session)?);
        }
        let guest_running = call("SourceVm::run_state", || shared.vm.run_state()) == RunState::Running;
        match shared.feed(Fed::PostcopyRequested { guest_running }) {
            Ok(()) => {
                // Lanes end with the chunk that they have, before the guest stops.
                shared.limiter.open();
                self.rounds()?.latest().iter().for_each(|round| round.abandon());
                Ok(true)
            }
            // Precopy goes on until the destination is ready.
            Err(Refusal::AcknowledgementsMissing { .. }) => Ok(false),
            Err(refusal) => Err(MigrationError::Internal(refusal.to_string()).into()),
        }
    }

    /// Wants the switch when the time or the rounds are over that an operator has set for precopy.
    pub(super) fn want_switch_if_due(&self) {
        let shared = &self.shared;
        if !shared.capabilities.postcopy_ram || shared.postcopy.is_wanted() {
            return;
        }
        let Parameters { postcopy_after: time, postcopy_after_rounds: rounds, .. } = shared.params();
        let (clock, begun) = {
            let statistics = shared.statistics.lock();
            (statistics.clock(), statistics.rounds_begun)
        };
        if !time.is_zero() && clock >= time || rounds > 0 && begun > u64::from(rounds) {
            shared.postcopy.want();
        }
    }

    /// What can be read of a device while the guest runs does not belong into the pause.
    fn tell_what_is_awaited(&mut self, device: &str) {
        let began = *self.switch_awaited.get_or_insert_with(Instant::now);
        if !self.switch_is_told && began.elapsed() >= LONG_AWAITED {
            self.switch_is_told = true;
            let text = format!(
                "the switch to postcopy waits: {device} is still being read while the guest runs, and would stand in the pause"
            );
            self.shared.tell(&Event::Warning(text));
        }
    }

    /// Waits, before the guest stops for the switch, until nothing lies before what a stopped guest waits for: lanes have sent the
    /// chunk that they had, and the network has delivered it. For [`EMPTYING`] at most.
    pub(super) fn let_channels_run_empty(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(rounds) = self.rounds.as_ref().filter(|_| self.is_postcopy()) else { return };
        // Some lanes begin no round before the one before it was flushed.
        let flushed = shared.lanes.queue.last_flushed();
        let rounds = rounds.latest();
        let unflushed = rounds.iter().map(|round| round.number()).filter(|&number| number > flushed).min();
        let main = self.main.as_ref().and_then(|main| main.channel.clone());
        let channels: Vec<_> = self.multifd.iter().cloned().chain(main).collect();
        let is_empty = || {
            let is_sent = unflushed.is_none_or(|number| shared.lanes.are_through(number));
            is_sent && channels.iter().all(|channel| channel.outstanding_bytes() == 0)
        };
        let until = Instant::now() + EMPTYING;
        // Who interrupts wants the migration to end, and the guest is to be stopped all the same before it goes on.
        while !is_empty() && Instant::now() < until {
            if self.waits.at_most(LOOK, || None::<()>).is_err() {
                return;
            }
        }
    }

    /// What a Sterna will drop is mostly known before the guest stops, and dropping it takes long where the guest has written far apart:
    /// it is named now, and what was written meanwhile next, as long as that gets less.
    pub(super) fn name_what_is_dropped(&mut self) -> Result<(), Break> {
        self.dropped = None;
        let shared = Arc::clone(&self.shared);
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        if self.rounds.is_none() || !self.is_postcopy() || !is_sterna {
            return Ok(());
        }
        self.flush_rounds()?;
        let (until, mut before) = (Instant::now() + EMPTYING, u64::MAX);
        let mut dropped = DirtyBitmaps::new(&shared.ram);
        loop {
            self.sync()?;
            let mut rest = self.rounds()?.unsent();
            round_up(&shared.ram, &rest);
            rest.drop_reported(&dropped);
            let count = rest.count();
            if count <= FEW_PAGES || count >= before || Instant::now() >= until {
                break;
            }
            before = count;
            let main = self.main()?;
            main.commands(&discards(&shared.ram, &rest))?;
            dropped.or_from(&rest);
            // It has dropped them when it answers.
            shared.probes.lock().send_keepalive();
            main.commands(&[Command::Ping(extension::KEEPALIVE_PING)])?;
            self.waits.was_not_silent();
            self.waits.at_most(EMPTYING, || shared.probes.lock().are_answered().then_some(()))?;
        }
        self.dropped = Some(dropped);
        Ok(())
    }

    /// Performs `SendFinalState` of a guest whose pages follow it: which pages the destination drops. Then it gets the devices.
    pub(super) fn send_final_state_of_postcopy(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.main()?);
        self.rounds()?.open_last();
        if let Some(streams) = &self.streams {
            streams.finish();
        }
        self.flush_rounds()?;
        self.sync()?;
        self.step(SwitchoverStep::LastSync);
        // Unsent, or written since.
        let unsent = self.rounds()?.unsent();
        round_up(&shared.ram, &unsent);
        let mut rest = DirtyBitmaps::new(&shared.ram);
        rest.or_from(&unsent);
        if let Some(dropped) = &self.dropped {
            rest.drop_reported(dropped);
        }
        self.step(SwitchoverStep::LastPages);
        self.send_streams()?;
        self.end_rounds();
        MigrationError::check_memory(&shared.ram)?;
        let sections = self.collect_devices()?;
        let is_sterna = shared.driver.inspect(Source::peer).sterna;
        self.package = package(&sections, is_sterna)?;
        self.step(SwitchoverStep::Devices);
        main.with(|stream| {
            stream.forget_block();
            shared.guest_source.send_switchover_start(stream)?;
            stream.commands(&discards(&shared.ram, &rest))
        })?;
        shared.postcopy.begin(&shared.ram, &unsent);
        let counters = Arc::clone(&shared.counters);
        let sender = PageSender::new(shared.ram.clone(), counters, &main, self.preempt.clone());
        let (answering, theirs) = (sender.clone(), Arc::clone(&shared));
        self.workers.spawn("requested pages", move || {
            if let Err(error) = answering.answer(&theirs.postcopy) {
                theirs.fail(error);
            }
        })?;
        self.page_sender = Some(sender);
        MigrationError::check_same_ram(&call("Vm::ram", || shared.vm.ram()), &shared.ram)?;
        // For a QEMU this is the commit.
        MigrationError::check_memory(&shared.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    /// Lanes send no page more before the guest runs, and no chunk.
    fn end_rounds(&self) {
        let shared = &self.shared;
        let peer = shared.driver.inspect(Source::peer);
        let takes_lanes = peer.sterna && Features(peer.features).contains(Features::POSTCOPY_LANES);
        if shared.capabilities.multifd && takes_lanes {
            shared.postcopy.keep_lanes();
        }
        shared.lanes.queue.end();
    }

    /// What remains of devices' streams. The destination loads them before it prepares, and needs no page for that.
    fn send_streams(&mut self) -> Result<(), Break> {
        let main = self.main()?;
        let Some(streams) = &self.streams else { return Ok(()) };
        match streams.on_lanes() {
            Some(_) => streams.await_lanes(&mut self.waits)?,
            None => streams.send_in_turn(&mut self.waits, &main)?,
        }
        self.step(SwitchoverStep::Streams);
        Ok(())
    }

    /// Writes the flushes of rounds that lanes have left.
    fn flush_rounds(&mut self) -> Result<(), Break> {
        let flushed = self.shared.lanes.queue.last_flushed();
        let rounds = self.rounds()?.latest();
        rounds.iter().filter(|round| round.number() > flushed).try_for_each(|round| self.run_dry(round))
    }

    fn collect_devices(&mut self) -> Result<Vec<u8>, MigrationError> {
        let (shared, run_state) = (Arc::clone(&self.shared), self.run_state_before());
        let mut collector = self.main()?.with(|stream| Ok(stream.device_collector()))?;
        let collected = collector.collect(|stream| shared.guest_source.send_devices(stream, run_state))?;
        Ok(collected.sections)
    }

    /// The destination gets the devices, and loads them; pages that it needs for that go out meanwhile.
    pub(super) fn send_package(&mut self) -> Result<(), MigrationError> {
        let package = std::mem::take(&mut self.package);
        self.main()?.with(|stream| {
            stream.send(|out| {
                Command::Ping(PACKAGE_PING).encode(out)?;
                // It was held against the limit when it was made.
                Command::Packaged(package.len() as u32).encode(out)?;
                out.extend_from_slice(&package);
                Ok(())
            })
        })?;
        self.waits.was_not_silent();
        Ok(())
    }

    /// Performs `SendRun`. The machine has committed: whatever happens here, the guest stays stopped.
    pub(super) fn send_run(&mut self) {
        self.step(SwitchoverStep::Prepare);
        let is_sterna = self.shared.driver.inspect(Source::peer).sterna;
        let sent = match is_sterna {
            true => self.main().and_then(|main| {
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

    /// Performs `SendPages`: until none is left.
    pub(super) fn send_pages(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.main()?);
        if !self.has_recovered() {
            self.note_start();
        }
        {
            let mut statistics = shared.statistics.lock();
            let now = shared.counters.now();
            statistics.at_start.get_or_insert(now);
            statistics.begin_postcopy();
            statistics.following_bytes = shared.postcopy.left_bytes();
            (statistics.round, statistics.next_round_bytes) = (None, 0);
        }
        let Some(sender) = self.page_sender.clone() else {
            return Err(MigrationError::Internal("pages follow, and nobody sends them".to_owned()).into());
        };
        let has_lanes = shared.postcopy.has_lanes() && !self.multifd.is_empty();
        if has_lanes {
            self.await_lanes()?;
        } else {
            self.send_background(&sender)?;
        }
        shared.postcopy.ends();
        shared.statistics.lock().has_sent_all();
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
        for channel in &self.multifd {
            if let Err(error) = channel.say_goodbye() {
                tracing::debug!(%error, "end of a multifd channel");
            }
        }
        Ok(())
    }

    /// Sends the pages that nobody asks for, over the main channel, until none is left and all that were asked for are sent.
    fn send_background(&mut self, sender: &PageSender) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (limiter, main) = (&shared.postcopy.limiter, self.main()?);
        loop {
            self.waits.until(|| (!limiter.is_spent()).then_some(()))?;
            let next = shared.postcopy.next_background(PATIENCE, sender.is_alone(), || sender.is_full());
            match next {
                Background::Run(run) => {
                    limiter.take(run.count * PAGE_SIZE as u64);
                    let bytes = sender.send(run)?;
                    shared.postcopy.work.sent_background(run.count, bytes);
                    if let Some(channel) = &main.channel {
                        shared.postcopy.pace.keep(0, channel);
                    }
                    let counts = shared.counters.now();
                    let mut statistics = shared.statistics.lock();
                    statistics.following_bytes = shared.postcopy.left_bytes();
                    statistics.observe(counts);
                    drop(statistics);
                    self.waits.was_not_silent();
                }
                Background::Wait => self.waits.idle(),
                Background::Done => return Ok(()),
            }
        }
    }

    /// Lanes send those pages. Waits until they are through, and all that were asked for are sent.
    fn await_lanes(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let (postcopy, lanes) = (&shared.postcopy, shared.lanes.count());
        postcopy.let_lanes_begin();
        let is_done = || (postcopy.lanes_are_through(lanes) && postcopy.ends_if_answered()).then_some(());
        while self.waits.at_most(PATIENCE, is_done)?.is_none() {
            let left = postcopy.left_bytes();
            let mut statistics = shared.statistics.lock();
            statistics.following_bytes = left;
            statistics.observe(shared.counters.now());
        }
        shared.statistics.lock().following_bytes = 0;
        Ok(())
    }

    /// The destination runs the guest, and the connection broke.
    pub(super) fn report_paused(&mut self, cause: Cause) {
        if matches!(cause, Cause::OperatorPaused | Cause::DestinationFailed(_)) {
            // What threads met of the channels is only what followed.
            self.shared.forget_error();
            self.shared.note_cause(cause);
        }
        let why = self.shared.error().map_or_else(|| format!("{cause:?}"), |error| error.to_string());
        self.shared.statistics.lock().pause_postcopy(&why);
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

/// Whether a Sterna destination is set for it.
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

/// Opens the channel of requested pages. A Sterna is told whose it is, and of which session: one that comes late, when the connection
/// has been made anew, is not to be taken for the present one's.
fn connect_preempt(shared: &Shared, session: u32) -> Result<Arc<Channel>, MigrationError> {
    let params = shared.params();
    let setup = params.limits.setup;
    let channel =
        Channel::connect_with(&shared.to, params.tls.as_ref(), setup, &shared.connecting, |channel| {
            channel.set_stall_limit(Some(params.limits.stall));
            shared.adopt(channel)
        })?;
    let identity = &shared.identity;
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
    /// The destination says that it has started the guest: a Sterna when it was asked, a QEMU when the devices are loaded.
    pub(in crate::outgoing) fn destination_started(&self) -> Result<(), MigrationError> {
        let is_due = self.driver.inspect(|machine| machine.is_postcopy() && machine.state().is_committed());
        if !is_due {
            let what = "it said that the guest was started, and nobody had told it to".to_owned();
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.statistics.lock().acknowledged.get_or_insert_with(std::time::Instant::now);
        self.report(Fed::DestinationStarted);
        Ok(())
    }
}
