//! The control thread: performs the handover machine's actions, one after the other.

mod precopy;
mod undoing;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use sterna_proto::source::{
    Action, Cause, End, Event as Fed, GuestAfter, Outcome as MachineOutcome, Refusal, Source, State,
};
use sterna_wire::extension::{self, Handover};
use sterna_wire::main::Command;

use super::carrier::transport::Opened;
use super::outcome::{Outcome, RetryError};
use super::postcopy::interface::Postcopy;
use super::reconnection::interface::Reconnection;
use super::shared::Shared;
use super::switchover::{Complete, Switchover};
use super::transfer::Transfer;
use super::{ask, carrier, checkpoints, configuration, postcopy, reconnection, whole_memory};
use crate::error::MigrationError;
use crate::events::{Event, SwitchoverStep};
use crate::identity::Identity;
use crate::interruption::Break;
use crate::params::StatusQuestions;
use crate::threads::{self, ThreadRole, call, caught, tried};
use crate::vm::RunState;

/// The interval at which an idle control thread wakes.
const PATIENCE: Duration = Duration::from_millis(50);

/// Starts the control thread of a new migration.
pub(super) fn spawn(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    let control = Control::new(Arc::clone(shared));
    threads::spawn(ThreadRole::Migration, move || control.run(), died(shared)).map(drop)
}

/// Tries to free a held guest: feeds the machine, and starts a new control thread.
pub(super) fn retry(shared: &Arc<Shared>) -> Result<(), RetryError> {
    let state = || shared.driver.inspect(Source::state);
    // The custody is held as soon as the machine is. The control thread of the last attempt may still have to
    // end.
    if state() == State::Held {
        shared.wait();
    }
    let mut control = Control::new(Arc::clone(shared));
    let (go, gone) = mpsc::channel();
    let (begun, has_begun) = mpsc::channel();
    let at_begin = begun.clone();
    // This comes before the machine gets the event: a thread must exist that performs the machine's actions.
    let performs = move || {
        let _ = at_begin.send(Ok(()));
        if gone.recv().is_ok() {
            control.perform_all();
        }
    };
    let died = died(shared);
    let died = move |error: MigrationError| {
        // The receiver exists until the thread has begun. Before that nothing has changed, and the guest stays held.
        if begun.send(Err(error.clone())).is_err() {
            died(error);
        }
    };
    let system = |error: MigrationError| RetryError::System(error.into());
    threads::spawn(ThreadRole::Migration, performs, died).map_err(system)?;
    // The VMM's hook for new threads runs first, and may panic.
    let first = has_begun.recv().unwrap_or(Ok(()));
    drop(has_begun);
    first.map_err(system)?;
    let Some(before) = shared.begin_again() else { return Err(Refusal::NotHeld { state: state() }.into()) };
    if let Err(refusal) = shared.feed(Fed::OperatorRetry) {
        shared.end(before);
        return Err(refusal.into());
    }
    // The thread waits for nothing else.
    let _ = go.send(());
    Ok(())
}

/// Opens every channel, and writes the first bytes of each. The guest has all of its memory then.
fn open(shared: &Arc<Shared>) -> Opened {
    // The seeding of a standby has begun to speak with it, and cannot be silent for long.
    if shared.protecting.is_none() {
        let is_cancelled = || shared.session.connecting.is_cancelled();
        let check = || if is_cancelled() { Err(MigrationError::Cancelled) } else { Ok(()) };
        whole_memory::await_whole(&shared.guest.ram, check)?;
    }
    let carrier = (carrier::of(&shared.session.to).open)(shared)?;
    carrier.greet()?;
    Ok(carrier)
}

/// Ends a migration whose control thread died.
///
/// No thread performs its actions any more, and callers must not wait without end.
fn died(shared: &Arc<Shared>) -> impl FnOnce(MigrationError) + Send + 'static {
    let shared = Arc::clone(shared);
    move |error| {
        shared.note_error(error.clone());
        shared.interrupt();
        let held = !shared.guest.ram.custody().may_run();
        shared.end(Outcome::Failed { error, held });
    }
}

pub(super) struct Control {
    shared: Arc<Shared>,
    transfer: Transfer,
    postcopy: Box<dyn Postcopy>,
    reconnection: Box<dyn Reconnection>,
    /// The switchover without postcopy.
    complete: Complete,
    /// The destination was sent the configuration from which it makes its VM.
    is_configured: bool,
}

impl Control {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            transfer: Transfer::new(Arc::clone(&shared)),
            postcopy: postcopy::of(&shared),
            reconnection: reconnection::of(&shared),
            complete: Complete,
            is_configured: false,
            shared,
        }
    }

    fn run(mut self) {
        self.shared.tell(&Event::Status(crate::events::Status::Setup));
        match tried("connecting", || open(&self.shared)) {
            Ok(carrier) => {
                self.transfer.waits.keep_alive(Some(Arc::clone(carrier.main())));
                self.transfer.carrier = Some(carrier);
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
            self.transfer.waits.idle();
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
        if let Some(sent) = self.transfer.round_trip.sent.take_if(|_| !matches!(action, Action::Identify)) {
            self.transfer.round_trip.took = sent.elapsed();
        }
        match action {
            Action::Identify => self.identify()?,
            Action::Configure => self.configure()?,
            Action::SendHandoverId => self.send_handover_id()?,
            Action::Compare => self.compare()?,
            Action::StartPrecopy => self.precopy()?,
            Action::ResumePrecopy => self.resume_precopy()?,
            Action::StopGuest => self.stop_guest(),
            Action::ReleaseHooks => self.release_hooks(),
            Action::SendFinalState => {
                let (switchover, transfer) = self.switchover();
                switchover.send_final_state(transfer)?;
            }
            Action::SendPrepare => {
                let (switchover, transfer) = self.switchover();
                switchover.send_prepare(transfer)?;
            }
            Action::SendEof | Action::SendRun => {
                let (switchover, transfer) = self.switchover();
                switchover.commit(transfer);
            }
            Action::SendPages => self.postcopy.send_pages(&mut self.transfer)?,
            Action::Recover => self.postcopy.recover(&mut self.transfer)?,
            Action::ReportPaused(cause) => self.postcopy.report_paused(cause),
            Action::TakeCheckpoints => checkpoints::take(&mut self.transfer)?,
            Action::ReportUndecided(cause) => self.report_undecided(cause),
            Action::AskAgain => self.ask_again(),
            Action::CloseChannels => {
                self.close_channels();
                self.shared.report(Fed::ChannelsClosed);
            }
            Action::BreakOff => {
                self.postcopy.session_lost();
                self.reconnection.break_off(&mut self.transfer)?;
            }
            Action::Reconnect => self.reconnection.reconnect()?,
            Action::ReacquireHooks => self.reacquire_hooks(),
            Action::ResumeGuest => self.resume_guest(),
            Action::StopTracking => self.stop_tracking(),
            Action::Finish(_) => {}
        }
        Ok(())
    }

    /// How the guest leaves. The machine knows whether the switch to postcopy has begun.
    fn switchover(&mut self) -> (&mut dyn Switchover, &mut Transfer) {
        let switchover = match self.postcopy.switchover() {
            Some(switch) => switch,
            None => &mut self.complete,
        };
        (switchover, &mut self.transfer)
    }

    fn identify(&mut self) -> Result<(), MigrationError> {
        let main = self.transfer.main()?;
        if self.is_configured {
            // The destination has its VM now, and reads the stream from its beginning.
            self.transfer.carrier()?.greet()?;
        } else {
            self.transfer.read_return_path()?;
        }
        self.transfer.round_trip.sent = Some(Instant::now());
        let mut commands = vec![Command::OpenReturnPath, Command::Ping(1)];
        if self.transfer.course.announces_handover() {
            commands.push(Command::Ping(extension::EXTENSION_PING));
        }
        commands.push(Command::Ping(extension::FENCE_PING));
        main.commands(&commands)
    }

    fn configure(&mut self) -> Result<(), MigrationError> {
        self.is_configured = true;
        configuration::send(&self.shared, &*self.transfer.main()?)
    }

    fn send_handover_id(&mut self) -> Result<(), MigrationError> {
        let Identity { id, secret } = &self.shared.handover.identity;
        let (version, body) = Handover { migration_id: *id, secret: Some(secret.clone()) }.encode();
        let header = (Handover::SECTION_NAME, Handover::SECTION_INSTANCE, version);
        self.transfer.main()?.with(|stream| stream.full_section(header, &body, true))?;
        self.reconnection.announce(&self.transfer)
    }

    fn compare(&mut self) -> Result<(), MigrationError> {
        let Some(record) = self.shared.guest.vm.compatibility() else {
            return Err(MigrationError::Internal("there is no compatibility record".to_owned()));
        };
        let body = call("Device::save of the compatibility record", || record.save())?;
        let header = (extension::COMPATIBILITY_SECTION, 0, record.version());
        self.transfer.main()?.with(|stream| stream.full_section(header, &body, true))?;
        self.transfer.main()?.commands(&[Command::Ping(extension::COMPATIBILITY_PING)])
    }

    fn stop_guest(&mut self) {
        // Waits for an operator's act that began while the guest was free. No other act begins.
        self.shared.handover.custody.wait_for_act();
        // A guest that stops here gives no useful hints any more.
        self.transfer.pacing.hints.stop();
        let (switchover, transfer) = self.switchover();
        let prepared = Break::failure(switchover.prepare_stop(transfer));
        let was_running =
            call("SourceVm::run_state", || self.shared.guest.vm.run_state()) == RunState::Running;
        let began = Instant::now();
        self.transfer.guest.step_began = began;
        self.transfer.guest.stopping = Some(was_running);
        match call("SourceVm::stop", || self.shared.guest.vm.stop()) {
            Ok(()) => {
                self.transfer.guest.ran_before = was_running;
                let devices = match &mut self.transfer.streams {
                    Some(streams) => streams.stop(&mut self.transfer.waits),
                    None => Ok(()),
                };
                let mut statistics = self.shared.measures.statistics.lock();
                statistics.stopped_at = Some(began);
                statistics.at_stop = Some(self.shared.measures.counters.now());
                drop(statistics);
                self.transfer.step(SwitchoverStep::Stop);
                self.shared.tell(&Event::Stopped);
                // The guest is stopped in any case: the machine resumes it and its devices. It has to know the
                // failure before, because otherwise it would release hooks while a device may still write.
                if let Err(error) = devices.and(prepared) {
                    self.shared.fail(error);
                }
                self.transfer.guest.stopping = None;
                self.shared.report(Fed::GuestStopped { was_running });
            }
            Err(error) => {
                self.transfer.guest.stopping = None;
                self.shared.note_error(error.into());
                self.shared.report(Fed::GuestStopFailed);
            }
        }
    }

    fn release_hooks(&mut self) {
        // An operator may have waited in pre-switchover. That time is not part of the steps.
        self.transfer.guest.step_began = Instant::now();
        for hook in self.shared.guest.vm.hooks() {
            // The hook counts as released before the attempt, because half a release must be undone too.
            self.shared.handover.released.lock().push(Arc::clone(&hook));
            if let Err(error) = call(format!("Hook::release of {}", hook.name()), || hook.release()) {
                self.shared.note_error(error.into());
                self.shared.report(Fed::HookReleaseFailed);
                return;
            }
        }
        self.transfer.step(SwitchoverStep::ReleaseHooks);
        self.shared.report(Fed::HooksReleased);
    }

    fn report_undecided(&mut self, cause: Cause) {
        let why = self.shared.error().map_or_else(|| format!("{cause:?}"), |error| error.to_string());
        let can_ask =
            self.shared.driver.inspect(|machine| machine.peer().sterna) && self.shared.session.facts.can_ask;
        let asked = match self.shared.params().status_questions {
            StatusQuestions::Operator => "is not asked, since this side leaves the question to an operator",
            StatusQuestions::Auto if can_ask => "is asked again",
            StatusQuestions::Auto => "cannot be asked",
        };
        // A page that follows the guest exists only here.
        let then = match self.shared.driver.inspect(Source::is_postcopy) {
            true => {
                ". After destination-runs, 'migrate' with 'resume' here sends the pages that the guest lacks there"
            }
            false => "",
        };
        let text = format!(
            "undecided: the guest was handed over and the acknowledgement was lost ({why}). It stays stopped here and \
             the destination {asked}. If it does not answer, check whether the guest runs there and decide: \
             source-runs only if the guest does not run there and never will, else destination-runs{then}"
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
        self.transfer.workers.join();
        if let Some(streams) = self.transfer.streams.take() {
            streams.end();
        }
        self.reconnection.close();
        self.transfer.course.close();
        self.postcopy.close();
        self.transfer.waits.keep_alive(None);
        if let Some(mut carrier) = self.transfer.carrier.take() {
            carrier.close();
        }
        self.shared.drop_channels();
    }

    fn finish(&mut self, outcome: MachineOutcome) {
        // A destination that took the guest closes its channels by itself. Threads of a finished migration end
        // then.
        self.close_channels();
        self.transfer.unthrottle();
        self.transfer.pacing.hints.end();
        if outcome.end != End::Completed {
            self.reconnection.say_farewell();
        }
        // The search for failed pages comes only now, after everything is undone and the guest runs.
        self.shared.find_failed_pages();
        if outcome.end == End::Completed {
            self.shared.tell_passed();
            self.transfer.note_start();
        }
        if let Some(mut rounds) = self.transfer.rounds.take()
            && outcome.end != End::Completed
        {
            rounds.leave_unfinished(Duration::ZERO);
        }
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
            *self.shared.handover.tracking.lock() = None;
        }
        self.shared.end(ended);
    }
}
