//! Precopy: performs what the policy says ([`crate::precopy`]) until it requests the switchover.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Refusal, Source, SwitchoverAck};
use sterna_ram::DirtyBitmaps;
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::first_round::LONGEST_WAIT;
use super::hints::Hints;
use super::rounds::Rounds;
use super::{Control, no_rounds, setup, slowdown};
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::order::RoundPages;
use crate::outgoing::limits::ack_form;
use crate::outgoing::protection::EpochStreams;
use crate::outgoing::rdma::Work;
use crate::outgoing::streams::DeviceStreams;
use crate::params::{NonConvergence, ZeroPageDetection};
use crate::precopy::{Answer, Begun, FIXED_DOWNTIME, Input, Output, Recorded, Settings, SyncResult, WINDOW};
use crate::streams::Streamed;
use crate::threads::call;
use crate::vm::RunState;

/// Probes of the destination are this far apart at least.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// How often it is looked whether a switch to postcopy that is wanted has become possible.
const SWITCH_LOOK: Duration = Duration::from_millis(10);
/// How often the effect of dirty limits is noted for readers.
const LIMIT_INTERVAL: Duration = Duration::from_millis(250);

impl Control {
    /// Performs `StartPrecopy`: returns when the machine wants something else done.
    pub(super) fn precopy(&mut self) -> Result<(), Break> {
        self.introduce_peer();
        self.warn_without_return();
        self.count_acknowledgements();
        self.hand_memory_over()?;
        self.advise_postcopy()?;
        self.await_promise()?;
        let shared = Arc::clone(&self.shared);
        let is_mapped = shared.capabilities.mapped_ram;
        // Lanes into a file must know the places of pages, and one that writes the main connection must find a section of RAM.
        // Multifd channels write their first SYNC before START, whose flush waits for it.
        let needs_places = is_mapped || self.rdma.is_some() && !shared.capabilities.multifd;
        if needs_places {
            self.start_ram()?;
        }
        let main = self.main()?;
        if shared.protecting.is_none() {
            self.streams = DeviceStreams::begin(&shared, &self.multifd)?;
        }
        if let Some(streams) = &self.streams {
            streams.start(&main, &mut self.workers)?;
        }
        let on_lanes = self.streams.as_ref().and_then(DeviceStreams::on_lanes);
        if let Some(rdma) = &self.rdma {
            let teller = Arc::clone(&shared);
            let warn = move |text| teller.tell(&Event::Warning(text));
            self.rdma_work = Some(Work::new(Arc::clone(rdma), &shared.ram, warn)?);
        }
        let ends = (self.multifd.as_slice(), self.file.as_ref(), self.rdma_work.as_ref());
        let writers = setup::writers(&shared, &main, ends)?;
        setup::start_lanes(&shared, writers, on_lanes, &mut self.workers)?;
        if let Some(work) = &self.rdma_work {
            setup::start_rdma(&shared, &main, work, &mut self.workers)?;
        }
        self.waits.until(|| shared.lanes.are_through(0).then_some(()))?;
        call("DirtySource::start", || shared.vm.dirty_source().start()).map_err(MigrationError::from)?;
        if !needs_places {
            self.start_ram()?;
        }
        if shared.protecting.is_some() {
            self.epoch_streams = EpochStreams::begin(Streamed::of(&shared.vm.devices()), &main)?;
            self.send_epoch_streams()?;
        }

        let all = DirtyBitmaps::new(&shared.ram);
        all.set_all();
        shared.guest_source.leave_out(&all);
        let look_for_absent = shared.guest_source.knows_absent()
            || shared.params().zero_page_detection != ZeroPageDetection::None;
        let takes_hints = Hints::of(&shared).is_some();
        let round = Rounds::first(&shared, all, look_for_absent, takes_hints);
        let (mut slice, until) = (0, Instant::now() + LONGEST_WAIT);
        let is_ready = takes_hints && self.prepare_round(&round, &mut slice, Some(until))?;
        if is_ready {
            self.hints.ask(&round);
            self.await_hints(until)?;
        }
        // Before the first page can be sent and lost. Nothing returns from here before the rounds are known.
        if shared.unconfirmed.get().is_some() {
            shared.report(Fed::MayReconnect);
        }
        let rounds = Rounds::begin(&shared, Arc::clone(&round));
        if let Some(streams) = &self.streams {
            streams.enter_round(rounds.round().number());
        }
        rounds.tell();
        let begun = Begun {
            settings: self.settings(),
            channels: shared.lanes.count() as u32,
            round_trip: self.round_trip,
            // *Prepare* and the start cost a round trip each.
            fixed_downtime: self.round_trip * 2 + FIXED_DOWNTIME,
        };
        *shared.policy.lock() = Some(Recorded::new(begun, rounds.snapshot()));
        self.rounds = Some(rounds);
        if takes_hints && !is_ready {
            // Lanes send meanwhile.
            self.prepare_round(&round, &mut slice, None)?;
            self.hints.ask(&round);
        }
        self.follow_policy(begun.settings)
    }

    /// Writes what stands before RAM, and RAM's START section.
    pub(super) fn start_ram(&mut self) -> Result<(), MigrationError> {
        let (shared, main) = (Arc::clone(&self.shared), self.main()?);
        main.with(|stream| shared.guest_source.send_early(stream))?;
        match (&mut self.file, &self.rdma) {
            (Some(file), _) if shared.capabilities.mapped_ram => file.start_ram(&shared, &main),
            (_, Some(rdma)) => {
                rdma.start_ram(&main, &shared.guest_source.blocks(), shared.capabilities.multifd)?;
                main.with(|stream| shared.guest_source.send_setup(stream))
            }
            _ => main.with(|stream| {
                stream.ram_start(&shared.guest_source.blocks(), shared.capabilities.multifd)?;
                shared.guest_source.send_setup(stream)
            }),
        }
    }

    /// Of the present form of `switchover-ack`: one is due for each device that asks (specs/stream.md §5.3).
    pub(super) fn count_acknowledgements(&self) {
        let vm = &self.shared.vm;
        // A standby's side of a device's stream is there from the beginning, and sends none.
        let is_protected = self.shared.protecting.is_some();
        if ack_form(&self.shared.capabilities, &vm.machine_type()) == SwitchoverAck::Modern && !is_protected {
            for _ in vm.devices().iter().filter(|device| device.asks_switchover_ack()) {
                self.shared.report(Fed::DeviceAsksAck);
            }
        }
    }

    /// Says what the peer turned out to be; without a return path nothing is known of it.
    fn introduce_peer(&self) {
        if self.shared.capabilities.return_path {
            let peer = self.shared.driver.inspect(Source::peer);
            self.shared.statistics.lock().peer_is_sterna = Some(peer.sterna);
            self.shared.tell(&Event::Peer { sterna: peer.sterna, features: peer.features });
        }
    }

    /// Performs what the policy asks for, until the machine wants something else done.
    pub(super) fn follow_policy(&mut self, mut settings: Settings) -> Result<(), Break> {
        let mut outputs = VecDeque::new();
        loop {
            self.want_switch_if_due();
            if self.switch_if_wanted()? {
                return Ok(());
            }
            let now = self.settings();
            if now != settings {
                settings = now;
                outputs.extend(self.tell_policy(Input::Set(settings)));
            }
            outputs.extend(self.tell_answer());
            let input = match outputs.pop_front() {
                Some(output) => self.perform_output(output)?,
                None => Some(self.wait_for_policy()?),
            };
            if matches!(input, Some(Input::Ended)) {
                return Ok(());
            }
            if let Some(input) = input {
                outputs.extend(self.tell_policy(input));
            }
        }
    }

    /// Performs one output, and gives the input that answers it. `Ended`: the switchover was requested.
    fn perform_output(&mut self, output: Output) -> Result<Option<Input>, Break> {
        tracing::trace!(?output, "precopy");
        match output {
            Output::Sync => {
                let synced = self.sync()?;
                return Ok(Some(Input::Synced(synced, self.rounds()?.snapshot())));
            }
            Output::Publish { tries_network } => self.publish(tries_network)?,
            Output::RunDry { number } => {
                let number = self.reconnecting.rounds_before + number;
                let Some(round) = self.rounds()?.round_numbered(number) else {
                    return Err(MigrationError::Internal(format!("round {number} is not there")).into());
                };
                self.run_dry(&round)?;
                self.probe()?;
                return Ok(Some(Input::Flushed(self.rounds()?.snapshot())));
            }
            Output::Throttle(percent) => self.slowdown.throttle(percent),
            Output::LimitDirtyRate(Some(bytes)) => self.slowdown.limit_dirty_rates(bytes)?,
            // Only at the end: see `unthrottle`.
            Output::LimitDirtyRate(None) => {}
            Output::Warn(standstill) => {
                let why = slowdown::why_not(&self.shared, standstill);
                self.shared.tell(&Event::Warning(format!("the migration does not converge: {why}")));
            }
            Output::GiveUp(standstill) => {
                let why = slowdown::why_not(&self.shared, standstill);
                if self.shared.params().non_convergence == NonConvergence::Postcopy {
                    // The switch may wait for a device.
                    if !self.shared.postcopy.is_wanted() {
                        let text =
                            format!("precopy does not converge ({why}): the guest goes on in postcopy");
                        self.shared.tell(&Event::Warning(text));
                        self.shared.postcopy.want();
                    }
                    return Ok(None);
                }
                return Err(MigrationError::NotConverging { why }.into());
            }
            Output::RequestSwitchover => {
                // So that little of them is left for the pause.
                self.send_epoch_streams()?;
                let is_taken = self.request_switchover();
                let snapshot = self.rounds()?.snapshot();
                return Ok(Some(if is_taken { Input::Ended } else { Input::NotAcknowledged(snapshot) }));
            }
        }
        Ok(None)
    }

    /// Waits until the policy is due, or the round comes to its end.
    fn wait_for_policy(&mut self) -> Result<Input, Break> {
        let shared = Arc::clone(&self.shared);
        let wake_at =
            shared.policy.lock().as_ref().map_or(Duration::ZERO, |policy| policy.policy().wake_at());
        let round = Arc::clone(self.rounds()?.round());
        let was_rearmed = self.rearmed_seen == round.number();
        let began = Instant::now();
        // The switch may be wanted and not possible yet.
        let is_waiting = shared.postcopy.is_wanted();
        let longest = if is_waiting { SWITCH_LOOK } else { WINDOW };
        let patience = wake_at.saturating_sub(shared.statistics.lock().clock()).min(longest);
        let is_due = || !was_rearmed && round.is_rearmed() || !is_waiting && shared.postcopy.is_wanted();
        let came = self.waits.at_most(patience, || is_due().then_some(()))?;
        let mut snapshot = self.rounds()?.snapshot();
        if came.is_some() && round.is_rearmed() {
            self.rearmed_seen = round.number();
        } else if !patience.is_zero() {
            snapshot.late = Some(began.elapsed().saturating_sub(patience));
        }
        Ok(Input::Observed(snapshot))
    }

    pub(super) fn tell_policy(&mut self, input: Input) -> Vec<Output> {
        let mut policy = self.shared.policy.lock();
        let Some(policy) = policy.as_mut() else { return Vec::new() };
        let outputs = policy.handle(input);
        let policy = policy.policy();
        let mut statistics = self.shared.statistics.lock();
        statistics.expected_downtime = policy.expected_downtime();
        statistics.dirty_pages_per_second = policy.dirty_pages_per_second();
        statistics.cpu_throttle_percent = policy.throttle_percent();
        statistics.is_dirty_limited = policy.is_dirty_limited();
        let is_limited = statistics.is_dirty_limited;
        drop(statistics);
        if is_limited && self.limits_noted.elapsed() >= LIMIT_INTERVAL {
            self.limits_noted = Instant::now();
            self.slowdown.note_times();
        }
        outputs
    }

    pub(super) fn settings(&self) -> Settings {
        let mut params = self.shared.params();
        // Its guest stands once for that, and checkpoints do not depend on the limit.
        if self.shared.protecting.is_some() && params.non_convergence == NonConvergence::KeepGoing {
            params.non_convergence = NonConvergence::Switchover;
        }
        Settings::new(&params, &self.shared.capabilities)
    }

    /// Asks a Sterna destination for an answer, which it gives when it has all pages of the round that was just flushed.
    fn probe(&mut self) -> Result<(), MigrationError> {
        let is_sterna = self.shared.driver.inspect(Source::peer).sterna;
        let mut probes = self.shared.probes.lock();
        if !is_sterna || !probes.is_due(PROBE_INTERVAL) {
            return Ok(());
        }
        probes.send(self.shared.unsent_bytes());
        drop(probes);
        self.waits.was_not_silent();
        self.main()?.commands(&[Command::Ping(extension::KEEPALIVE_PING)])
    }

    fn tell_answer(&mut self) -> Vec<Output> {
        let answer = self.shared.probes.lock().take_answer();
        answer.map_or_else(Vec::new, |(took, unsent_bytes)| {
            self.tell_policy(Input::Answered(Answer { took, unsent_bytes }))
        })
    }

    /// Requests the switchover. False: the destination's acknowledgements are missing.
    fn request_switchover(&mut self) -> bool {
        let guest_running = self.shared.vm.run_state() == RunState::Running;
        match self.shared.feed(Fed::SwitchoverRequested { guest_running }) {
            Ok(()) => true,
            Err(Refusal::AcknowledgementsMissing { .. }) => false,
            Err(refusal) => {
                self.shared.note_error(MigrationError::Internal(refusal.to_string()));
                self.shared.report(Fed::LocalFailure);
                true
            }
        }
    }

    /// Syncs. Hints end here: of a page that is hinted later, this sync may have reported a write that is dropped because the round
    /// would read the page.
    pub(super) fn sync(&mut self) -> Result<SyncResult, MigrationError> {
        self.hints.stop();
        match &mut self.rounds {
            Some(rounds) => rounds.sync(self.streams.as_ref()),
            None => Err(no_rounds()),
        }
    }

    /// Sends what devices of a protected guest have in their streams, while the guest runs.
    fn send_epoch_streams(&mut self) -> Result<(), Break> {
        let (Some(streams), Some(main)) = (&self.epoch_streams, self.main.clone()) else { return Ok(()) };
        let (waits, limiter) = (&mut self.waits, &self.shared.limiter);
        streams.send_most(&main, |bytes| {
            waits.was_not_silent();
            waits.until(|| Some(()))?;
            limiter.take(bytes);
            Ok(())
        })
    }

    /// Publishes the next round.
    pub(super) fn publish(&mut self, tries_network: bool) -> Result<(), MigrationError> {
        let rounds = self.rounds()?;
        rounds.publish(tries_network);
        let number = rounds.round().number();
        if let Some(streams) = &self.streams {
            streams.enter_round(number);
        }
        self.rounds()?.tell();
        Ok(())
    }

    /// Waits until every lane is through with `round`, and writes its flush.
    pub(super) fn run_dry(&mut self, round: &RoundPages) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let number = round.number();
        self.waits.until(|| shared.lanes.are_through(number).then_some(()))?;
        let is_last = self.rounds()?.is_last();
        match &self.file {
            // In the last round all of it is put on the disk at once, after the devices.
            Some(file) if !is_last => file.settle()?,
            Some(_) => {}
            None if shared.capabilities.multifd => {
                let main = self.main()?;
                let marks = shared.unconfirmed.get().is_some();
                main.with(|stream| {
                    stream.ram_part(false, true)?;
                    if marks { stream.commands(&[Command::Ping(extension::ROUND_PING)]) } else { Ok(()) }
                })?;
                if let Some(rdma) = self.rdma.as_ref().filter(|_| !is_last) {
                    rdma.wait_for_flush(&main)?;
                }
            }
            None => {}
        }
        shared.lanes.queue.flushed(number);
        self.rounds()?.close(round);
        Ok(())
    }

    /// Removes every throttle, however the migration ends; idempotent.
    pub(super) fn unthrottle(&mut self) {
        let outputs = self.tell_policy(Input::Ended);
        self.shared.statistics.lock().dirty_limit_times = None;
        self.slowdown.take_back(&outputs);
    }
}
