//! The control thread of an incoming migration: performs the handover machine's actions.

#[cfg(feature = "postcopy")]
mod early_guest;
#[cfg(not(feature = "postcopy"))]
#[path = "control/early_guest/off.rs"]
mod early_guest;
mod hooks;
mod lost;
mod starting;

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_proto::destination::{Action, Cause, Destination, Event as Fed, Held, Outcome, State};
use sterna_ram::Custody;
use sterna_wire::extension;
use sterna_wire::return_path::ReturnMessage;

use super::accept::warn;
use super::arrival::Arrival;
use super::shared::Shared;
use super::{checkpoints, file, loader, memory_files, multifd_lane, streams};
use crate::driver::{Driver, Waited};
use crate::error::{Awaited, Ending, MigrationError, Untimely};
use crate::events::{Event, Status};
use crate::hooks::Hook;
use crate::interruption::Break;
use crate::threads::{self, NewThread, ThreadRole, caught};
use crate::vm::RunState;

const PATIENCE: Duration = Duration::from_millis(50);
/// How long the source may be silent after EOF, until it has sent the description or closed the channel.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Starts the control thread. It waits until the last channel has connected.
///
/// # Errors
/// The operating system refuses the thread, or the VMM's hook for new threads panics on it.
pub(super) fn spawn(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    let (shared, at_death) = (Arc::clone(shared), Arc::clone(shared));
    let (begun, has_begun) = mpsc::channel();
    let at_begin = begun.clone();
    let work = move || {
        // The caller does not wait any more if it has panicked.
        let _ = at_begin.send(Ok(()));
        if let Some(driver) = shared.wait_for_migration() {
            let mut control = Control {
                shared: Arc::clone(&shared),
                threads: Vec::new(),
                acquired: Vec::new(),
                left_held: false,
                taken_over: false,
                start_was_tried: false,
                beside: None,
                last_status: None,
                lost: None,
            };
            control.run(driver);
        }
    };
    let died = move |error: MigrationError| {
        let _ = begun.send(Err(error.clone()));
        // No thread performs the machine's actions. If none has begun, the VM and its custody are as before.
        if !at_death.end_before_it_began(error.clone()) {
            at_death.end(Arrival::Failed(error));
        }
    };
    threads::spawn(ThreadRole::Incoming, work, died)?;
    // The hook runs first. A thread that it ends must not leave a source waiting, so no source can come before.
    has_begun.recv().unwrap_or(Ok(()))
}

struct Control {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Acquired hooks, in the order of acquisition.
    acquired: Vec<Arc<dyn Hook>>,
    /// A hook could not be given back, so this side may still own its resource.
    left_held: bool,
    /// The VM has taken the guest over without starting it.
    taken_over: bool,
    /// The guest's start was attempted.
    start_was_tried: bool,
    /// The thread of callbacks that may wait for a page, in postcopy: see `starting`.
    beside: Option<JoinHandle<()>>,
    last_status: Option<Status>,
    /// When the connection was lost, and why.
    lost: Option<(Instant, String)>,
}

fn custody_after(arrival: &Arrival) -> Custody {
    match arrival {
        Arrival::Completed(_) => Custody::Arrived,
        Arrival::Failed(_) => Custody::NoGuest,
    }
}

impl Control {
    fn run(&mut self, driver: &Driver<Destination>) {
        self.shared.tell(&Event::Status(Status::Setup));
        loop {
            match caught("the incoming migration's control thread", || self.turn(driver)) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    self.shared.fail(error);
                    std::thread::sleep(PATIENCE);
                }
            }
        }
    }

    /// Performs the next action, if there is one. Returns true after the last action.
    fn turn(&mut self, driver: &Driver<Destination>) -> bool {
        self.shared.tell_passed(driver, &mut self.last_status);
        self.start_loading(driver);
        let Some(action) = driver.next_action(PATIENCE) else {
            let is_left =
                self.shared.closing.is_cancelled() && driver.inspect(Destination::state) == State::Held;
            if is_left {
                if let Err(error) = self.shared.target.keep_memory() {
                    self.shared.tell(&Event::Warning(error.to_string()));
                }
                // The guest stays loaded, so that the VMM can start it.
                self.shared.guest_is(Custody::Arrived);
            }
            return is_left;
        };
        self.shared.tell_passed(driver, &mut self.last_status);
        tracing::debug!(?action, "destination");
        if let Action::Finish(outcome) = action {
            if let Err(error) = caught("the end of the incoming migration", || self.finish(outcome)) {
                // The panic's place does not matter: the outcome determines which side has the guest.
                let arrival = match outcome {
                    Outcome::Running => Arrival::Completed(RunState::Running),
                    Outcome::Paused => Arrival::Completed(RunState::Paused),
                    Outcome::Failed { .. } => Arrival::Failed(error),
                };
                self.shared.guest_is(custody_after(&arrival));
                self.shared.end(arrival);
            }
            return true;
        }
        let place = format!("a callback of the VMM during {action:?}");
        if let Err(panic) = caught(&place, || self.perform(driver, action)) {
            self.panicked(action, panic);
        }
        false
    }

    /// Reports a panic inside an action to the machine as a failure of that action.
    fn panicked(&mut self, action: Action, error: MigrationError) {
        let event = match action {
            Action::FinishLoading | Action::SendPong | Action::Recover | Action::SayResumed => {
                return self.shared.fail(error);
            }
            Action::AcquireHooks => Fed::HookAcquireFailed,
            Action::StartGuest => Fed::GuestStartFailed,
            Action::TakeOverPaused => Fed::GuestStarted,
            Action::GiveBackHooks => Fed::HookGiveBackFailed,
            _ => return self.shared.tell(&Event::Warning(error.to_string())),
        };
        self.shared.note_error(error);
        self.shared.report(event);
    }

    /// Starts the loader and the lanes when the last channel has connected.
    fn start_loading(&mut self, driver: &Driver<Destination>) {
        if !self.threads.is_empty() || driver.inspect(Destination::state) != State::Active {
            return;
        }
        if let Some((since, _)) = self.lost.take() {
            self.shared.tell(&Event::Reconnected { took: since.elapsed(), resent_bytes: 0 });
        }
        for inbox in self.shared.streams.all() {
            let shared = Arc::clone(&self.shared);
            self.start(ThreadRole::LoadDevice.of(&inbox.device.name), move || streams::load(&shared, &inbox));
        }
        let lanes = if self.shared.file.is_some() { 0 } else { self.shared.places.lanes() };
        for index in 0..lanes {
            let shared = Arc::clone(&self.shared);
            self.start(ThreadRole::Lane.of(index), move || multifd_lane::receive(&shared, index));
        }
        if self.shared.file.is_some() {
            let shared = Arc::clone(&self.shared);
            self.start(ThreadRole::Loader, move || file::load(&shared));
        }
        if let Some(channel) = self.shared.places.main() {
            let shared = Arc::clone(&self.shared);
            self.start(ThreadRole::Loader, move || loader::load(&shared, &channel));
        }
    }

    fn start(&mut self, thread: impl Into<NewThread>, work: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let died = move |error| {
            shared.fail(error);
            shared.nudge();
        };
        match threads::spawn(thread, work, died) {
            Ok(thread) => self.threads.push(thread),
            Err(error) => self.shared.fail(error),
        }
    }

    fn perform(&mut self, driver: &Driver<Destination>, action: Action) {
        match action {
            Action::FinishLoading => self.finish_loading(driver),
            Action::AcquireHooks => self.acquire_hooks(driver),
            Action::SendPong => self.answer_prepare(driver),
            Action::StartGuest => self.start_guest(),
            Action::TakeOverPaused => self.take_over_paused(),
            Action::SayStarted => self.say_started(),
            Action::FinishPages => self.finish_pages(driver),
            Action::KeepWaiting => self.keep_waiting(),
            Action::Recover => self.recover(),
            Action::SayResumed => self.say_resumed(),
            Action::AnnounceNetwork => {
                self.take_over_if_paused(driver);
                self.announce();
            }
            Action::SendShut(code) => {
                if code == 0 {
                    self.take_over_if_paused(driver);
                }
                match self.shared.target.follower().filter(|_| code == 0) {
                    Some(follower) => checkpoints::begin(&self.shared, follower),
                    None => self.send(&ReturnMessage::Shut(code)),
                }
            }
            // Questions are answered on the connections on which they arrive.
            Action::Answer(_) => {}
            Action::ReportHeld(why) => self.report_held(why),
            Action::StopLoading => self.stop_loading(),
            Action::Suspend => self.suspend(),
            Action::GiveBackHooks => self.give_back_hooks(),
            // The channels carry the checkpoints. They are closed after the last checkpoint.
            Action::CloseChannels if self.shared.is_followed() => {}
            Action::CloseChannels => self.close_channels(),
            Action::ResetMemory => self.reset(),
            Action::Finish(_) => {}
        }
    }

    fn finish_loading(&mut self, driver: &Driver<Destination>) {
        if !driver.inspect(|machine| machine.is_still_due(Action::FinishLoading)) {
            return;
        }
        match self.await_completion(driver) {
            Ok(wants_to_run) => {
                let run = wants_to_run && self.shared.autostart.begin_use();
                self.shared.report(Fed::LoadComplete { run });
            }
            Err(Break::Interrupted) => driver.put_back(Action::FinishLoading),
            Err(Break::Failed(error)) => self.shared.fail(error),
        }
    }

    /// Waits until everything is loaded, and checks it. Returns whether the guest ran at the source.
    fn await_completion(&self, driver: &Driver<Destination>) -> Result<bool, Break> {
        self.wait_for_streams(driver)?;
        // The last byte of guest memory has arrived. From here on no transport may write memory: it is checked,
        // and then the guest uses it.
        self.shared.carrier.end_writes(&|text| warn(&self.shared, text))?;
        self.shared.rounds.complete()?;
        let wants_to_run = match self.shared.postcopy.arriving() {
            Some(_) => self.shared.target.finish_devices()?,
            None => self.shared.target.finish_loading()?,
        };
        self.check_memory()?;
        Ok(wants_to_run)
    }

    /// Waits until every device's stream is loaded. Fails if no stream progresses within the stall limit.
    fn wait_for_streams(&self, driver: &Driver<Destination>) -> Result<(), Break> {
        let streams = &self.shared.streams;
        let stall = self.shared.params.limits.stall;
        let is_alone = !self.shared.capabilities.multifd || self.shared.file.is_some();
        if is_alone {
            // All chunks are on the main channel, which was read to its end.
            streams.all_came()?;
        }
        let mut seen = (streams.progress(), Instant::now());
        loop {
            match driver.wait(PATIENCE, || streams.are_loaded().then_some(())) {
                Waited::Got(()) => return Ok(()),
                Waited::Interrupted => return Err(Break::Interrupted),
                Waited::TimedOut => {}
            }
            let progress = streams.progress();
            if progress != seen.0 {
                seen = (progress, Instant::now());
            } else if seen.1.elapsed() >= stall {
                streams.all_came()?;
                return Err(MigrationError::Limit { what: streams.unloaded(), after: stall }.into());
            }
        }
    }

    /// Answers the source's request to prepare. After the answer the source may release the guest, so this is
    /// the last moment at which the guest can stay at the source.
    fn answer_prepare(&mut self, driver: &Driver<Destination>) {
        // The connection was lost, or this side has failed since. A source that received the answer would
        // commit. Its guest would then be paused until the source has learned the outcome from this side.
        if driver.inspect(Destination::state) != State::Prepared {
            return;
        }
        match self.check_memory() {
            Ok(()) => self.send(&ReturnMessage::Pong(extension::PREPARE_PING)),
            Err(error) => self.shared.fail(error),
        }
    }

    /// Checks guest memory for a late error: the VMM may report a failed page at any time after its bytes have
    /// arrived.
    fn check_memory(&self) -> Result<(), MigrationError> {
        self.shared.target.guest().map_or(Ok(()), MigrationError::check_memory)
    }

    /// Sends a message to the source. A failure to send is only logged: the source will ask again.
    fn send(&mut self, message: &ReturnMessage) {
        if let Err(error) = self.shared.say(message) {
            tracing::debug!(%error, ?message, "return path");
        }
    }

    fn report_held(&mut self, why: Held) {
        // A target that runs no guests (an image) cannot start one later, so there is nothing to hold.
        if !self.shared.target.runs_guests() {
            if matches!(why, Held::Hooks | Held::Start)
                && let Some(place) = self.shared.target.keep_only_copy()
            {
                self.shared.note_kept(place);
            }
            return self.shared.report(Fed::Discard);
        }
        let text = match why {
            Held::UntilSourceCompleted => {
                "the guest has arrived and is held: when the source's status is *completed*, release it with cont"
                    .to_owned()
            }
            Held::Pages => format!(
                "{}, and only the source has {} pages of the guest's memory: the guest runs here until it needs one \
                 of them, and then waits. Keep both processes. 'migrate' with 'resume' at the source continues the \
                 migration to {}; 'migrate-recover' here sets another address",
                self.why_pages_do_not_come(),
                self.shared.postcopy.arriving().map_or(0, |arriving| arriving.left()),
                self.shared.address
            ),
            Held::StartInPostcopy => {
                let why = self.shared.start_error.lock().as_ref().map(ToString::to_string);
                format!(
                    "the guest could not be started ({}) and its source never runs it again. It stays here, paused, and its pages \
                     follow: fix that, then start it with cont",
                    why.as_deref().unwrap_or("reason unknown")
                )
            }
            Held::Hooks | Held::Start => format!(
                "this side has the only copy of the guest and could not start it ({}): fix that, then cont; a device \
                 that still does not run is left out then",
                self.shared.error().map_or_else(|| "reason unknown".to_owned(), |error| error.to_string())
            ),
        };
        self.shared.tell(&Event::Warning(text));
    }

    /// Stops lanes and loader. The main channel can still be written.
    fn stop_loading(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.rounds.stop();
        self.shared.streams.stop();
        self.shared.places.shut_lanes();
        // No guest runs. This wakes a device that waits for a page while it is loaded.
        self.shared.postcopy.shut_preempt();
        self.shared.postcopy.let_go();
        if let Some(main) = self.shared.places.main() {
            main.finish_reading();
        }
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // An error of the join is ignored: a panic in the thread was already reported.
            let _ = thread.join();
        }
        self.shared.postcopy.join();
    }

    /// Lets the source finish. It may still write the description after EOF. Closing a channel with unread
    /// bytes would break the source's connection before it has read SHUT.
    fn hear_the_source_out(&mut self) {
        if let Some(main) = self.shared.places.main() {
            main.set_own_stall_limit(Some(LAST_WORDS));
            // Fails only if the connection is closed already.
            let _ = main.finish_writing();
        }
        if self.shared.places.taken_lanes().iter().any(|channel| channel.is_tls()) {
            self.wait_for_ends();
        }
        self.shared.places.shut_lanes();
        self.shared.postcopy.shut_preempt();
        self.shared.rounds.stop();
        self.shared.streams.stop();
        self.join();
    }

    /// Waits until multifd channels have ended. A QEMU that has read SHUT sends a TLS close on every multifd
    /// channel. If it cannot, it treats the migration as failed and would resume its guest.
    fn wait_for_ends(&self) {
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn close_channels(&mut self) {
        if !self.shared.stopping.load(Ordering::Acquire) {
            self.hear_the_source_out();
        } else {
            // Loading was stopped because this side has failed.
            self.shared.carrier.say_error();
        }
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.rounds.stop();
        self.shared.streams.stop();
        self.shared.places.end();
        self.shared.lobby.end();
        self.join();
        self.shared.carrier.close();
    }

    fn reset(&mut self) {
        // The source knows about the failure. The search comes first, because the reset discards the pages.
        self.shared.find_failed_pages();
        memory_files::end(&self.shared);
        if let Err(error) = self.shared.streams.end_load() {
            self.shared.tell(&Event::Warning(error.to_string()));
        }
        for left in self.shared.target.reset() {
            self.shared.tell(&Event::Warning(left));
        }
    }

    fn finish(&mut self, outcome: Outcome) {
        let has_arrived = !matches!(outcome, Outcome::Failed { .. });
        if let Some(follower) = self.shared.target.follower().filter(|_| has_arrived) {
            follower.wait_until_over();
            self.stop_loading();
        }
        self.close_channels();
        self.join_beside();
        let arrival = match outcome {
            Outcome::Running => Arrival::Completed(RunState::Running),
            Outcome::Paused => Arrival::Completed(RunState::Paused),
            Outcome::Failed { cause, hooks_left_held } => {
                if hooks_left_held {
                    self.shared.tell(&Event::Warning("some hooks could not be released".to_owned()));
                }
                if cause == Cause::NotResumed {
                    self.shared.note_error(self.not_resumed());
                }
                let breaks = |error: MigrationError| error.fault().is_none();
                if cause == Cause::Abandoned && self.shared.error().is_some_and(breaks) {
                    // The operator's cancellation is the reason, although a connection broke at the same time.
                    self.shared.forget_error();
                }
                self.shared.note_error(self.explain(cause));
                let error = self.shared.error().unwrap_or_else(|| self.explain(cause));
                // The source learns only that the migration failed, so the reason is logged here.
                tracing::warn!("incoming migration failed: {error}");
                Arrival::Failed(error)
            }
        };
        self.shared.guest_is(custody_after(&arrival));
        self.shared.end(arrival);
        let status = self.shared.status();
        self.shared.tell_status(status, &mut self.last_status);
    }

    /// Describes the machine's cause, for the case that no thread has recorded a more precise error.
    fn explain(&self, cause: Cause) -> MigrationError {
        let limits = &self.shared.params.limits;
        match cause {
            Cause::TimedOut(State::Setup) => {
                MigrationError::Limit { what: Awaited::Loading, after: limits.setup }
            }
            Cause::TimedOut(state) => {
                MigrationError::Limit { what: Awaited::Destination(state), after: limits.prepare }
            }
            Cause::Abandoned => MigrationError::Cancelled,
            Cause::ConnectionLost | Cause::NotResumed => Ending::Lost.into(),
            Cause::PeerMisbehaved => Untimely::Element.into(),
            Cause::LocalFailure | Cause::HookAcquire | Cause::GuestStart => {
                MigrationError::Internal(format!("failed for an unrecorded reason: {cause:?}"))
            }
        }
    }
}
