//! Precopy: performs the outputs of the policy ([`crate::precopy`]) until it requests the switchover.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Refusal, Source};
use sterna_ram::DirtyBitmaps;
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::first_round::LONGEST_WAIT;
use super::hints::Hints;
use super::rounds::Rounds;
use super::{Control, no_rounds, not_open, slowdown};
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::order::RoundPages;
use crate::outgoing::shared::Shared;
use crate::outgoing::waits::Waits;
use crate::params::{NonConvergence, ZeroPageDetection};
use crate::precopy::{
    self, Answer, Begun, FIXED_DOWNTIME, Input, Output, Recorded, Settings, SyncResult, WINDOW,
};
use crate::threads::call;
use crate::vm::RunState;

/// The shortest time between two probes of the destination.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which a requested switch to postcopy is tried again.
const SWITCH_LOOK: Duration = Duration::from_millis(10);
/// The interval at which the effect of dirty limits is copied to the statistics.
const LIMIT_INTERVAL: Duration = Duration::from_millis(250);

impl Control {
    /// Performs `StartPrecopy`: returns when the machine has another action.
    pub(super) fn precopy(&mut self) -> Result<(), Break> {
        self.introduce_peer();
        self.warn_without_return();
        self.count_acknowledgements();
        let carrier = self.carrier.as_mut().ok_or_else(not_open)?;
        carrier.enter(&mut self.waits)?;
        self.advise_postcopy()?;
        self.await_promise()?;
        let shared = Arc::clone(&self.shared);
        let begins_early = self.carrier()?.begins_ram_before_lanes();
        if begins_early {
            self.start_ram()?;
        }
        let main = self.main()?;
        let channels = self.carrier.as_ref().ok_or_else(not_open)?.multifd();
        self.streams = self.course.begin_streams(channels)?;
        self.start_lanes()?;
        call("DirtySource::start", || shared.guest.vm.dirty_source().start())
            .map_err(MigrationError::from)?;
        if !begins_early {
            self.start_ram()?;
        }
        self.course.ram_begun(&main, &mut paced(&mut self.waits, &shared))?;

        let all = DirtyBitmaps::new(&shared.guest.ram);
        all.set_all();
        shared.guest.source.leave_out(&all);
        let look_for_absent = shared.guest.source.knows_absent()
            || shared.params().zero_page_detection != ZeroPageDetection::None;
        let takes_hints = Hints::of(&shared).is_some();
        let round = Rounds::first(&shared, all, look_for_absent, takes_hints);
        let (mut slice, until) = (0, Instant::now() + LONGEST_WAIT);
        let is_ready = takes_hints && self.prepare_round(&round, &mut slice, Some(until))?;
        if is_ready {
            self.pacing.hints.ask(&round);
            self.await_hints(until)?;
        }
        self.may_reconnect();
        let rounds = Rounds::begin(&shared, Arc::clone(&round));
        if let Some(streams) = &self.streams {
            streams.enter_round(rounds.round().number());
        }
        rounds.tell();
        let begun = Begun {
            settings: self.settings(),
            channels: shared.session.lanes.count() as u32,
            round_trip: self.round_trip.took,
            // *Prepare* and the start cost a round trip each.
            fixed_downtime: self.round_trip.took * 2 + FIXED_DOWNTIME,
        };
        *shared.measures.policy.lock() = Some(Recorded::new(begun, rounds.snapshot()));
        self.rounds = Some(rounds);
        if takes_hints && !is_ready {
            // Lanes send pages meanwhile.
            self.prepare_round(&round, &mut slice, None)?;
            self.pacing.hints.ask(&round);
        }
        self.follow_policy(begun.settings)
    }

    /// Writes the sections before RAM, and RAM's START section.
    pub(super) fn start_ram(&mut self) -> Result<(), MigrationError> {
        self.main()?.with(|stream| self.shared.guest.source.send_early(stream))?;
        self.carrier()?.begin_ram()
    }

    /// Tells the machine how many devices have to acknowledge the switchover.
    pub(super) fn count_acknowledgements(&self) {
        for _ in 0..self.course.acknowledging_devices() {
            self.shared.report(Fed::DeviceAsksAck);
        }
    }

    /// Reports the peer's features to the machine. Without a return path they are unknown.
    fn introduce_peer(&self) {
        if self.shared.capabilities.return_path {
            let peer = self.shared.driver.inspect(Source::peer);
            self.shared.measures.statistics.lock().peer_is_sterna = Some(peer.sterna);
            self.shared.tell(&Event::Peer { sterna: peer.sterna, features: peer.features });
        }
    }

    /// Performs the policy's outputs, until the machine has another action.
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
            Output::Throttle(percent) => self.pacing.slowdown.throttle(percent),
            Output::LimitDirtyRate(Some(bytes)) => self.pacing.slowdown.limit_dirty_rates(bytes)?,
            // The limit is removed only at the end: see `unthrottle`.
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
                // This is done before the pause, so that less of the streams is left for it.
                let main = self.main()?;
                self.course.prepare_pause(&main, &mut paced(&mut self.waits, &self.shared))?;
                let is_taken = self.request_switchover();
                let snapshot = self.rounds()?.snapshot();
                return Ok(Some(if is_taken { Input::Ended } else { Input::NotAcknowledged(snapshot) }));
            }
        }
        Ok(None)
    }

    /// Waits until the policy is due, or until the round ends.
    fn wait_for_policy(&mut self) -> Result<Input, Break> {
        let shared = Arc::clone(&self.shared);
        let wake_at =
            shared.measures.policy.lock().as_ref().map_or(Duration::ZERO, |policy| policy.policy().wake_at());
        let round = Arc::clone(self.rounds()?.round());
        let was_rearmed = self.pacing.rearmed_seen == round.number();
        let began = Instant::now();
        // The switch may be requested and not possible yet.
        let is_waiting = shared.postcopy.is_wanted();
        let longest = if is_waiting { SWITCH_LOOK } else { WINDOW };
        let patience = wake_at.saturating_sub(shared.measures.statistics.lock().clock()).min(longest);
        let is_due = || !was_rearmed && round.is_rearmed() || !is_waiting && shared.postcopy.is_wanted();
        let came = self.waits.at_most(patience, || is_due().then_some(()))?;
        let mut snapshot = self.rounds()?.snapshot();
        if came.is_some() && round.is_rearmed() {
            self.pacing.rearmed_seen = round.number();
        } else if !patience.is_zero() {
            snapshot.late = Some(began.elapsed().saturating_sub(patience));
        }
        Ok(Input::Observed(snapshot))
    }

    pub(super) fn tell_policy(&mut self, input: Input) -> Vec<Output> {
        let mut policy = self.shared.measures.policy.lock();
        let Some(policy) = policy.as_mut() else { return Vec::new() };
        let outputs = policy.handle(input);
        let policy = policy.policy();
        if let (Input::Synced(..) | Input::Flushed(_), Some(estimate)) = (input, policy.estimate()) {
            tracing::debug!(?estimate, "the remaining pages");
        }
        let mut statistics = self.shared.measures.statistics.lock();
        statistics.expected_downtime = policy.expected_downtime();
        statistics.dirty_pages_per_second = policy.dirty_pages_per_second();
        statistics.cpu_throttle_percent = policy.throttle_percent();
        statistics.is_dirty_limited = policy.is_dirty_limited();
        let is_limited = statistics.is_dirty_limited;
        drop(statistics);
        if is_limited && self.pacing.limits_noted.elapsed() >= LIMIT_INTERVAL {
            self.pacing.limits_noted = Instant::now();
            self.pacing.slowdown.note_times();
        }
        outputs
    }

    pub(super) fn settings(&self) -> Settings {
        let mut params = self.shared.params();
        self.course.adjust(&mut params);
        precopy::settings(&params, &self.shared.capabilities)
    }

    /// Sends a probe to a Sterna destination.
    ///
    /// The destination answers when it has all pages of the round that was just flushed.
    fn probe(&mut self) -> Result<(), MigrationError> {
        let is_sterna = self.shared.driver.inspect(Source::peer).sterna;
        let mut probes = self.shared.measures.probes.lock();
        if !is_sterna || !probes.is_due(PROBE_INTERVAL) {
            return Ok(());
        }
        probes.send(self.shared.unsent_bytes());
        drop(probes);
        self.waits.was_not_silent();
        self.main()?.commands(&[Command::Ping(extension::KEEPALIVE_PING)])
    }

    fn tell_answer(&mut self) -> Vec<Output> {
        let answer = self.shared.measures.probes.lock().take_answer();
        answer.map_or_else(Vec::new, |(took, unsent_bytes)| {
            self.tell_policy(Input::Answered(Answer { took, unsent_bytes }))
        })
    }

    /// Requests the switchover. False: the destination's acknowledgements are missing.
    fn request_switchover(&mut self) -> bool {
        let guest_running =
            call("SourceVm::run_state", || self.shared.guest.vm.run_state()) == RunState::Running;
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

    /// Syncs, and ends hints.
    ///
    /// If a page were hinted later, this sync may have reported its write. That report is dropped because the
    /// round would read the page.
    pub(super) fn sync(&mut self) -> Result<SyncResult, MigrationError> {
        self.pacing.hints.stop();
        match &mut self.rounds {
            Some(rounds) => rounds.sync(self.streams.as_ref()),
            None => Err(no_rounds()),
        }
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

    /// Waits until every lane has finished `round`, and writes its flush.
    pub(super) fn run_dry(&mut self, round: &RoundPages) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let number = round.number();
        self.waits.until(|| shared.session.lanes.are_through(number).then_some(()))?;
        let is_last = self.rounds()?.is_last();
        self.carrier()?.end_round(is_last)?;
        shared.session.lanes.queue.flushed(number);
        self.rounds()?.close(round);
        Ok(())
    }

    /// Removes every throttle, at each end of the migration; idempotent.
    pub(super) fn unthrottle(&mut self) {
        let outputs = self.tell_policy(Input::Ended);
        self.shared.measures.statistics.lock().dirty_limit_times = None;
        self.pacing.slowdown.take_back(&outputs);
    }
}

/// The function to call before a piece is sent while the guest runs.
///
/// It returns early if the machine has another action, and waits for the bandwidth limit.
fn paced<'a>(waits: &'a mut Waits, shared: &'a Shared) -> impl FnMut(u64) -> Result<(), Break> + 'a {
    move |bytes| {
        waits.was_not_silent();
        waits.until(|| Some(()))?;
        shared.session.limiter.take(bytes);
        Ok(())
    }
}
