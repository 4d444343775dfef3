//! The control thread: performs the handover machine's actions, one after the other.

mod checkpoints;
mod first_round;
mod handing_over;
mod hints;
mod postcopy;
mod precopy;
mod reconnecting;
mod recovery;
mod rounds;
mod sessions;
mod setup;
mod slowdown;
mod switchover;
mod undoing;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{
    Action, Cause, End, Event as Fed, GuestAfter, Outcome as MachineOutcome, Refusal, Source, State,
};
use sterna_ram::DirtyBitmaps;
use sterna_transport::Channel;
use sterna_wire::extension::{self, Handover};
use sterna_wire::main::Command;

use super::ask;
use super::file::SaveFile;
use super::main_channel::MainChannel;
use super::outcome::{Outcome, RetryError};
use super::postcopy::sender::PageSender;
use super::protection::EpochStreams;
use super::rdma::{RdmaSource, Work};
use super::return_path;
use super::shared::Shared;
use super::streams::DeviceStreams;
use super::waits::Waits;
use super::workers::Workers;
use crate::error::MigrationError;
use crate::events::{Event, SwitchoverStep};
use crate::identity::Identity;
use crate::interruption::Break;
use crate::params::StatusQuestions;
use crate::threads::{self, call, caught, tried};
use crate::vm::RunState;
use hints::Hints;
use rounds::Rounds;
use sessions::Reconnecting;
use slowdown::Slowdown;

/// How often an idle control thread wakes.
const PATIENCE: Duration = Duration::from_millis(50);

const NAME: &str = "migration";

/// Starts the control thread of a new migration.
pub(super) fn spawn(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    let control = Control::new(Arc::clone(shared));
    threads::spawn(NAME, move || control.run(), died(shared)).map(drop)
}

/// Frees a held guest: the machine is fed here, and a new control thread performs what it asks for.
pub(super) fn retry(shared: &Arc<Shared>) -> Result<(), RetryError> {
    let state = || shared.driver.inspect(Source::state);
    // The custody says so as soon as the machine does: the control thread of the last attempt may still have to end.
    if state() == State::Held {
        shared.wait();
    }
    let mut control = Control::new(Arc::clone(shared));
    let (go, gone) = std::sync::mpsc::channel();
    // Before the machine learns it: there must be a thread that performs what it asks for.
    let performs = move || {
        if gone.recv().is_ok() {
            control.perform_all();
        }
    };
    threads::spawn(NAME, performs, died(shared)).map_err(|error| RetryError::System(error.to_string()))?;
    let Some(before) = shared.begin_again() else { return Err(Refusal::NotHeld { state: state() }.into()) };
    if let Err(refusal) = shared.feed(Fed::OperatorRetry) {
        shared.end(before);
        return Err(refusal.into());
    }
    // It waits for nothing else.
    let _ = go.send(());
    Ok(())
}

/// What remains to be done if a control thread died: no thread performs actions any more, and no caller may wait for ever.
fn died(shared: &Arc<Shared>) -> impl FnOnce(MigrationError) + Send + 'static {
    let shared = Arc::clone(shared);
    move |error| {
        shared.note_error(error.clone());
        shared.interrupt();
        let held = !shared.ram.custody().may_run();
        shared.end(Outcome::Failed { error, held });
    }
}

pub(super) struct Control {
    shared: Arc<Shared>,
    main: Option<Arc<MainChannel>>,
    /// The file, where the guest goes into one.
    file: Option<SaveFile>,
    multifd: Vec<Arc<Channel>>,
    /// The channel of pages that are waited for, in postcopy; what is sent at the switch; and who sends pages.
    preempt: Option<Arc<Channel>>,
    package: Vec<u8>,
    /// What the destination has been told to drop before the guest stopped for the switch.
    dropped: Option<DirtyBitmaps>,
    page_sender: Option<PageSender>,
    /// Since when the switch to postcopy waits for devices, and whether that was told.
    switch_awaited: Option<Instant>,
    switch_is_told: bool,
    /// Where memory is written by RDMA; and, once pages move, what is registered.
    rdma: Option<Arc<RdmaSource>>,
    rdma_work: Option<Arc<Work>>,
    workers: Workers,
    waits: Waits,
    rounds: Option<Rounds>,
    /// The round whose last slice the policy was woken for.
    rearmed_seen: u64,
    slowdown: Slowdown,
    hints: Hints,
    reconnecting: Reconnecting,
    limits_noted: Instant,
    /// Devices' streams, once they are begun.
    streams: Option<DeviceStreams>,
    /// The same of a guest that a standby protects.
    epoch_streams: Option<EpochStreams>,
    /// How long the peer took to answer.
    round_trip: Duration,
    identify_sent: Option<Instant>,
    /// The guest is being stopped, and whether it ran before.
    stopping: Option<bool>,
    /// Whether the guest ran before it was stopped for the switchover.
    ran_before: bool,
    /// Why it could not go on after that.
    not_resumed: Option<MigrationError>,
    step_began: Instant,
}

impl Control {
    fn new(shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        Self {
            main: None,
            file: None,
            multifd: Vec::new(),
            preempt: None,
            package: Vec::new(),
            dropped: None,
            page_sender: None,
            switch_awaited: None,
            switch_is_told: false,
            rdma: None,
            rdma_work: None,
            workers: Workers::new(Arc::clone(&shared)),
            waits: Waits::new(Arc::clone(&shared)),
            rounds: None,
            rearmed_seen: 0,
            slowdown: Slowdown::new(Arc::clone(&shared)),
            hints: Hints::new(Arc::clone(&shared)),
            reconnecting: Reconnecting::default(),
            limits_noted: now,
            streams: None,
            epoch_streams: None,
            round_trip: Duration::ZERO,
            identify_sent: None,
            stopping: None,
            ran_before: false,
            not_resumed: None,
            step_began: now,
            shared,
        }
    }

    fn run(mut self) {
        self.shared.tell(&Event::Status(crate::events::Status::Setup));
        match tried("connecting", || setup::connect(&self.shared)) {
            Ok(connected) => {
                self.waits.keep_alive(Some(Arc::clone(&connected.main)));
                self.main = Some(connected.main);
                (self.multifd, self.file, self.rdma) = (connected.multifd, connected.file, connected.rdma);
                self.shared.report(Fed::ChannelsReady);
            }
            Err(error) => self.shared.fail(error),
        }
        self.perform_all();
    }

    fn perform_all(&mut self) {
        loop {
            match caught("the migration's control thread", || self.turn()) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    self.shared.fail(error);
                    std::thread::sleep(PATIENCE);
                }
            }
        }
    }

    /// Performs the next action, if there is one. True: it was the last.
    fn turn(&mut self) -> bool {
        self.shared.tell_passed();
        let Some(action) = self.shared.driver.next_action(PATIENCE) else {
            self.waits.idle();
            return false;
        };
        self.shared.tell_passed();
        tracing::debug!(?action, "source");
        if let Action::Finish(outcome) = action {
            if let Err(error) = caught("the end of the migration", || self.finish(outcome)) {
                died(&self.shared)(error);
            }
            return true;
        }
        match caught(&format!("a callback of the VMM during {action:?}"), || self.perform(action)) {
            Ok(Ok(()) | Err(Break::Interrupted)) => {}
            Ok(Err(Break::Failed(error))) => self.shared.fail(error),
            Err(panic) => self.panicked(action, panic),
        }
        false
    }

    fn perform(&mut self, action: Action) -> Result<(), Break> {
        if let Some(sent) = self.identify_sent.take_if(|_| !matches!(action, Action::Identify)) {
            self.round_trip = sent.elapsed();
        }
        match action {
            Action::Identify => self.identify()?,
            Action::SendHandoverId => self.send_handover_id()?,
            Action::Compare => self.compare()?,
            Action::StartPrecopy => self.precopy()?,
            Action::ResumePrecopy => self.resume_precopy()?,
            Action::StopGuest => self.stop_guest(),
            Action::ReleaseHooks => self.release_hooks(),
            Action::SendFinalState if self.is_postcopy() => self.send_final_state_of_postcopy()?,
            Action::SendFinalState => self.send_final_state()?,
            Action::SendPrepare if self.is_postcopy() => self.send_package()?,
            Action::SendPrepare => self.send_prepare()?,
            Action::SendEof => self.send_eof(),
            Action::SendRun => self.send_run(),
            Action::SendPages => self.send_pages()?,
            Action::Recover => self.recover()?,
            Action::ReportPaused(cause) => self.report_paused(cause),
            Action::TakeCheckpoints => self.take_checkpoints()?,
            Action::ReportUndecided(cause) => self.report_undecided(cause),
            Action::AskAgain => self.ask_again(),
            Action::CloseChannels => {
                self.close_channels();
                self.shared.report(Fed::ChannelsClosed);
            }
            Action::BreakOff => self.break_off(),
            Action::Reconnect => self.reconnect(),
            Action::ReacquireHooks => self.reacquire_hooks(),
            Action::ResumeGuest => self.resume_guest(),
            Action::StopTracking => self.stop_tracking(),
            Action::Finish(_) => {}
        }
        Ok(())
    }

    /// Whether the guest goes on at the destination before its pages are there.
    fn is_postcopy(&self) -> bool {
        self.shared.driver.inspect(Source::is_postcopy)
    }

    /// The main channel, which is up once all is connected.
    fn main(&self) -> Result<Arc<MainChannel>, MigrationError> {
        let closed = || MigrationError::Internal("the main channel is not open".to_owned());
        self.main.clone().ok_or_else(closed)
    }

    /// The rounds, which are there once pages move.
    fn rounds(&mut self) -> Result<&mut Rounds, MigrationError> {
        self.rounds.as_mut().ok_or_else(no_rounds)
    }

    fn identify(&mut self) -> Result<(), MigrationError> {
        let main = self.main()?;
        if let Some(channel) = main.channel.clone() {
            let (shared, rdma) = (Arc::clone(&self.shared), self.rdma.clone());
            self.workers
                .spawn("return path", move || return_path::read(&shared, &channel, rdma.as_deref()))?;
        }
        self.identify_sent = Some(Instant::now());
        let mut commands = vec![Command::OpenReturnPath, Command::Ping(1)];
        // To a standby it is as any primary: the extension would announce a handover (specs/replica.md §4).
        if self.shared.protecting.is_none() {
            commands.push(Command::Ping(extension::EXTENSION_PING));
        }
        commands.push(Command::Ping(extension::FENCE_PING));
        main.commands(&commands)
    }

    fn send_handover_id(&mut self) -> Result<(), MigrationError> {
        let Identity { id, secret } = &self.shared.identity;
        let (version, body) = Handover { migration_id: *id, secret: Some(secret.clone()) }.encode();
        let header = (Handover::SECTION_NAME, Handover::SECTION_INSTANCE, version);
        self.main()?.with(|stream| stream.full_section(header, &body, true))?;
        self.announce_return()
    }

    fn compare(&mut self) -> Result<(), MigrationError> {
        let Some(record) = self.shared.vm.compatibility() else {
            return Err(MigrationError::Internal("there is no compatibility record".to_owned()));
        };
        let body = call("Device::save of the compatibility record", || record.save())?;
        let header = (extension::COMPATIBILITY_SECTION, 0, record.version());
        self.main()?.with(|stream| stream.full_section(header, &body, true))?;
        self.main()?.commands(&[Command::Ping(extension::COMPATIBILITY_PING)])
    }

    fn stop_guest(&mut self) {
        // Of the guest that stops here nothing more is to be expected.
        self.hints.stop();
        self.let_channels_run_empty();
        let named = Break::failure(self.name_what_is_dropped());
        let was_running = call("SourceVm::run_state", || self.shared.vm.run_state()) == RunState::Running;
        let began = Instant::now();
        self.step_began = began;
        self.stopping = Some(was_running);
        match call("SourceVm::stop", || self.shared.vm.stop()) {
            Ok(()) => {
                self.ran_before = was_running;
                let devices = match &mut self.streams {
                    Some(streams) => streams.stop(&mut self.waits),
                    None => Ok(()),
                };
                let mut statistics = self.shared.statistics.lock();
                statistics.stopped_at = Some(began);
                statistics.at_stop = Some(self.shared.counters.now());
                drop(statistics);
                self.step(SwitchoverStep::Stop);
                self.shared.tell(&Event::Stopped);
                // The guest is stopped anyway: the machine lets it run on, and its devices. It has to know
                // before, or it would release hooks while a device may still write.
                if let Err(error) = devices.and(named) {
                    self.shared.fail(error);
                }
                self.stopping = None;
                self.shared.report(Fed::GuestStopped { was_running });
            }
            Err(error) => {
                self.stopping = None;
                self.shared.note_error(error.into());
                self.shared.report(Fed::GuestStopFailed);
            }
        }
    }

    fn release_hooks(&mut self) {
        // An operator may have waited in pre-switchover: not a part of the steps.
        self.step_began = Instant::now();
        for hook in self.shared.vm.hooks() {
            // Counted as released before it is tried: half a release is to be undone too.
            self.shared.released.lock().push(Arc::clone(&hook));
            if let Err(error) = call(format!("Hook::release of {}", hook.name()), || hook.release()) {
                self.shared.note_error(error.into());
                self.shared.report(Fed::HookReleaseFailed);
                return;
            }
        }
        self.step(SwitchoverStep::ReleaseHooks);
        self.shared.report(Fed::HooksReleased);
    }

    fn send_prepare(&mut self) -> Result<(), MigrationError> {
        self.main()?.commands(&[Command::Ping(extension::PREPARE_PING)])?;
        // The main channel was not silent: nothing but the answer is due for a while.
        self.waits.was_not_silent();
        Ok(())
    }

    fn report_undecided(&mut self, cause: Cause) {
        let why = self.shared.error().map_or_else(|| format!("{cause:?}"), |error| error.to_string());
        let can_ask =
            self.shared.driver.inspect(|machine| machine.peer().sterna) && !self.shared.to.is_descriptor();
        let asked = match self.shared.params().status_questions {
            StatusQuestions::Operator => "is not asked, since this side leaves the question to an operator",
            StatusQuestions::Auto if can_ask => "is asked again",
            StatusQuestions::Auto => "cannot be asked",
        };
        let text = format!(
            "undecided: the guest was handed over and the acknowledgement was lost ({why}). It stays stopped here \
             and the destination {asked}. If it does not answer, check whether the guest runs there and decide: \
             source-runs only if it is gone for good, else destination-runs"
        );
        self.shared.tell(&Event::Warning(text));
    }

    fn ask_again(&mut self) {
        match ask::status(&self.shared) {
            Ok(status) => self.shared.report(Fed::AskAnswered(status)),
            Err(error) => {
                tracing::debug!(%error, "no answer to the status question");
                self.shared.report(Fed::AskFailed);
            }
        }
    }

    fn close_channels(&mut self) {
        self.shared.interrupt();
        self.workers.join();
        if let Some(streams) = self.streams.take() {
            streams.end();
        }
        if let Some(streams) = self.reconnecting.streams.take() {
            streams.end(&self.shared);
        }
        if let Some(streams) = self.epoch_streams.take() {
            streams.end();
        }
        self.shared.postcopy.pause();
        self.waits.keep_alive(None);
        self.main = None;
        // Unless it is in its place, it is gone with this.
        self.file = None;
        self.multifd.clear();
        self.page_sender = None;
        self.preempt = None;
        if let Some(rdma) = self.rdma.take() {
            // First the adapter's access ends, then memory is deregistered.
            rdma.destroy();
            self.rdma_work = None;
        }
        self.shared.drop_channels();
    }

    fn finish(&mut self, outcome: MachineOutcome) {
        // A destination that took the guest closes by itself; threads of a finished migration end with it.
        self.close_channels();
        self.unthrottle();
        self.hints.end();
        if outcome.end != End::Completed {
            self.say_farewell();
        }
        // Not before: all is undone, and the guest runs on.
        self.shared.find_failed_pages();
        if outcome.end == End::Completed {
            self.shared.tell_passed();
            self.note_start();
        }
        self.rounds = None;
        self.shared.tell_passed();
        let held = matches!(outcome.guest, GuestAfter::HeldStopped(_));
        let ended = match outcome.end {
            End::Completed => Outcome::Completed,
            End::Cancelled if !held => Outcome::Cancelled,
            End::Cancelled => Outcome::Failed { error: MigrationError::Cancelled, held },
            End::Failed(cause) => {
                let error = self.shared.note_cause(cause);
                tracing::warn!("migration failed: {error}");
                Outcome::Failed { error, held }
            }
        };
        if !held {
            *self.shared.tracking.lock() = None;
        }
        self.shared.end(ended);
    }

    /// The guest's run state before the switchover, under QEMU's name (specs/stream.md §1.10).
    fn run_state_before(&self) -> &'static str {
        if self.ran_before { "running" } else { "paused" }
    }

    /// The downtime ended when the destination acknowledged: it does so when the guest runs.
    fn note_start(&mut self) {
        let statistics = self.shared.statistics.lock();
        let end =
            statistics.stopped_at.zip(statistics.downtime).map(|(stopped, downtime)| stopped + downtime);
        drop(statistics);
        if let Some(end) = end {
            self.step_until(SwitchoverStep::Start, end);
        }
    }

    /// A step of the switchover ended now.
    fn step(&mut self, step: SwitchoverStep) {
        self.step_until(step, Instant::now());
    }

    fn step_until(&mut self, step: SwitchoverStep, now: Instant) {
        let took = now.saturating_duration_since(self.step_began);
        self.step_began = now;
        self.shared.statistics.lock().switchover.push((step, took));
        self.shared.tell(&Event::SwitchoverStep { step, took });
    }
}

fn no_rounds() -> MigrationError {
    MigrationError::Internal("no round has begun".to_owned())
}
