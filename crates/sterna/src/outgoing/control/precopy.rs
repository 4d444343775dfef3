//! Precopy: performs the outputs of the policy ([`crate::precopy`]) until it requests the switchover.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Refusal, Source};
use sterna_ram::DirtyBitmaps;
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::Control;
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::shared::Shared;
use crate::outgoing::transfer::first_round::LONGEST_WAIT;
use crate::outgoing::transfer::{Hints, Rounds, not_open, why_not};
use crate::outgoing::waits::Waits;
use crate::params::ZeroPageDetection;
use crate::precopy::{Answer, Input, Output, Recorded, Settings, WINDOW};
use crate::threads::call;
use crate::vm::RunState;

/// The shortest time between two probes of the destination.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// The interval at which a requested switch to postcopy is tried again.
const SWITCH_LOOK: Duration = Duration::from_millis(10);

impl Control {
    /// Performs `StartPrecopy`: returns when the machine has another action.
    pub(super) fn precopy(&mut self) -> Result<(), Break> {
        self.introduce_peer();
        self.reconnection.peer_is_known();
        self.transfer.count_acknowledgements();
        let carrier = self.transfer.carrier.as_mut().ok_or_else(not_open)?;
        carrier.enter(&mut self.transfer.waits)?;
        self.postcopy.advise(&self.transfer)?;
        self.reconnection.await_promise(&mut self.transfer)?;
        let shared = Arc::clone(&self.shared);
        let begins_early = self.transfer.carrier()?.begins_ram_before_lanes();
        if begins_early {
            self.transfer.start_ram()?;
        }
        let main = self.transfer.main()?;
        let channels = self.transfer.carrier.as_ref().ok_or_else(not_open)?.multifd();
        self.transfer.streams = self.transfer.course.begin_streams(channels)?;
        self.transfer.start_lanes()?;
        call("DirtySource::start", || shared.guest.vm.dirty_source().start())
            .map_err(MigrationError::from)?;
        if !begins_early {
            self.transfer.start_ram()?;
        }
        self.transfer.course.ram_begun(&main, &mut paced(&mut self.transfer.waits, &shared))?;

        let all = DirtyBitmaps::new(&shared.guest.ram);
        all.set_all();
        shared.guest.source.leave_out(&all);
        let knows_absent = shared.guest.source.knows_absent();
        let look_for_absent = knows_absent || shared.params().zero_page_detection != ZeroPageDetection::None;
        if look_for_absent && !knows_absent {
            // The migration works without this knowledge, but takes longer.
            if let Err(unknown) = shared.guest.ram.check_page_table() {
                shared.tell(&Event::Warning(unknown.to_string()));
            }
        }
        let takes_hints = self.postcopy.takes_hints() && Hints::of(&shared).is_some();
        let round = Rounds::first(&shared, all, look_for_absent, takes_hints);
        let (mut slice, until) = (0, Instant::now() + LONGEST_WAIT);
        let is_ready = takes_hints && self.transfer.prepare_round(&round, &mut slice, Some(until))?;
        if is_ready {
            self.transfer.pacing.hints.ask(&round);
            self.transfer.await_hints(until)?;
        }
        self.reconnection.pages_begin();
        let rounds = Rounds::begin(&shared, Arc::clone(&round));
        if let Some(streams) = &self.transfer.streams {
            streams.enter_round(rounds.round().number());
        }
        rounds.tell();
        let begun = self.transfer.begun();
        *shared.measures.policy.lock() = Some(Recorded::new(begun, rounds.snapshot()));
        self.transfer.rounds = Some(rounds);
        if takes_hints && !is_ready {
            // Lanes send pages meanwhile.
            self.transfer.prepare_round(&round, &mut slice, None)?;
            self.transfer.pacing.hints.ask(&round);
        }
        self.follow_policy(begun.settings)
    }

    /// Performs `ResumePrecopy`: returns when the machine has another action.
    pub(super) fn resume_precopy(&mut self) -> Result<(), Break> {
        self.reconnection.enter_session(&mut self.transfer)?;
        self.transfer.count_acknowledgements();
        self.postcopy.advise(&self.transfer)?;
        let settings = self.reconnection.send_again(&mut self.transfer)?;
        self.follow_policy(settings)
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
    fn follow_policy(&mut self, mut settings: Settings) -> Result<(), Break> {
        let mut outputs = VecDeque::new();
        loop {
            if self.postcopy.switch(&mut self.transfer)? {
                return Ok(());
            }
            let now = self.transfer.settings();
            if now != settings {
                settings = now;
                outputs.extend(self.transfer.tell_policy(Input::Set(settings)));
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
                outputs.extend(self.transfer.tell_policy(input));
            }
        }
    }

    /// Performs one output, and gives the input that answers it. `Ended`: the switchover was requested.
    fn perform_output(&mut self, output: Output) -> Result<Option<Input>, Break> {
        tracing::trace!(?output, "precopy");
        match output {
            Output::Sync => {
                let synced = self.transfer.sync()?;
                return Ok(Some(Input::Synced(synced, self.transfer.rounds()?.snapshot())));
            }
            Output::Publish { tries_network } => self.transfer.publish(tries_network)?,
            Output::RunDry { number } => {
                let round = self.transfer.rounds()?.round_of_policy(number)?;
                self.transfer.run_dry(&round)?;
                self.probe()?;
                return Ok(Some(Input::Flushed(self.transfer.rounds()?.snapshot())));
            }
            Output::Throttle(percent) => self.transfer.pacing.slowdown.throttle(percent),
            Output::LimitDirtyRate(Some(bytes)) => self.transfer.pacing.slowdown.limit_dirty_rates(bytes)?,
            // The limit is removed only at the end: see `unthrottle`.
            Output::LimitDirtyRate(None) => {}
            Output::Warn(standstill) => {
                let why = why_not(&self.shared, standstill);
                self.shared.tell(&Event::Warning(format!("the migration does not converge: {why}")));
            }
            Output::GiveUp(standstill) => {
                let why = why_not(&self.shared, standstill);
                if self.postcopy.takes_over(&why) {
                    return Ok(None);
                }
                return Err(MigrationError::NotConverging { why: Arc::new(why) }.into());
            }
            Output::RequestSwitchover => {
                // This is done before the pause, so that less of the streams is left for it.
                let main = self.transfer.main()?;
                self.transfer
                    .course
                    .prepare_pause(&main, &mut paced(&mut self.transfer.waits, &self.shared))?;
                let is_taken = self.request_switchover();
                let snapshot = self.transfer.rounds()?.snapshot();
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
        let round = Arc::clone(self.transfer.rounds()?.round());
        let was_rearmed = self.transfer.pacing.rearmed_seen == round.number();
        let began = Instant::now();
        // The switch may be requested and not possible yet.
        let is_waiting = self.postcopy.is_awaited();
        let longest = if is_waiting { SWITCH_LOOK } else { WINDOW };
        let patience = wake_at.saturating_sub(shared.measures.statistics.lock().clock()).min(longest);
        let is_due = || !was_rearmed && round.is_rearmed() || !is_waiting && self.postcopy.is_awaited();
        let came = self.transfer.waits.at_most(patience, || is_due().then_some(()))?;
        let mut snapshot = self.transfer.rounds()?.snapshot();
        if came.is_some() && round.is_rearmed() {
            self.transfer.pacing.rearmed_seen = round.number();
        } else if !patience.is_zero() {
            snapshot.late = Some(began.elapsed().saturating_sub(patience));
        }
        Ok(Input::Observed(snapshot))
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
        self.transfer.waits.was_not_silent();
        self.transfer.main()?.commands(&[Command::Ping(extension::KEEPALIVE_PING)])
    }

    fn tell_answer(&mut self) -> Vec<Output> {
        let answer = self.shared.measures.probes.lock().take_answer();
        answer.map_or_else(Vec::new, |(took, unsent_bytes)| {
            self.transfer.tell_policy(Input::Answered(Answer { took, unsent_bytes }))
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
