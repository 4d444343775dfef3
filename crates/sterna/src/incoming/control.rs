//! The control thread of an incoming migration: performs the handover machine's actions.

mod early_guest;
mod lost;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_proto::destination::{Action, Cause, Destination, Event as Fed, Held, Outcome, State};
use sterna_ram::Custody;
use sterna_wire::colo::Message;
use sterna_wire::extension;
use sterna_wire::return_path::ReturnMessage;

use super::arrival::Arrival;
use super::arriving::LastWord;
use super::follower::Follower;
use super::shared::Shared;
use super::{file, lane, loader, streams};
use crate::driver::{Driver, Waited};
use crate::error::MigrationError;
use crate::events::{Event, Status};
use crate::hooks::Hook;
use crate::interruption::Break;
use crate::threads::{self, call, caught, tried};
use crate::vm::RunState;

const PATIENCE: Duration = Duration::from_millis(50);
/// How long it may take until it is heard here that a source has closed its channels.
const CLOSING: Duration = Duration::from_secs(1);
/// How long a source may be silent between EOF and the end of the description, or its closing.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Starts the control thread; it waits until the last channel has come.
pub(super) fn spawn(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    let (shared, at_death) = (Arc::clone(shared), Arc::clone(shared));
    let work = move || {
        if let Some(driver) = shared.wait_for_migration() {
            let mut control = Control {
                shared: Arc::clone(&shared),
                threads: Vec::new(),
                acquired: Vec::new(),
                left_held: false,
                taken_over: false,
                start_has_failed: false,
                last_status: None,
                lost: None,
            };
            control.run(driver);
        }
    };
    threads::spawn("incoming", work, move |error| at_death.end(Arrival::Failed(error))).map(drop)
}

struct Control {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Hooks that are held, in the order of acquisition.
    acquired: Vec<Arc<dyn Hook>>,
    /// One that may be held anyway could not be given back.
    left_held: bool,
    /// The VM was told to take the guest over without starting it.
    taken_over: bool,
    /// Starting the guest was tried, in vain.
    start_has_failed: bool,
    last_status: Option<Status>,
    /// Since when the connection is lost, and how it was.
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

    /// Performs the next action, if there is one. True: it was the last.
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
                // It stays loaded, for the VMM to start.
                self.shared.guest_is(Custody::Arrived);
            }
            return is_left;
        };
        self.shared.tell_passed(driver, &mut self.last_status);
        tracing::debug!(?action, "destination");
        if let Action::Finish(outcome) = action {
            if let Err(error) = caught("the end of the incoming migration", || self.finish(outcome)) {
                // Whatever it was, who has the guest is certain.
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

    /// An action that panicked has failed: the machine hears of it as of any failure of that action.
    fn panicked(&mut self, action: Action, error: MigrationError) {
        let event = match action {
            Action::FinishLoading | Action::SendPong | Action::Recover | Action::SayResumed => {
                return self.shared.fail(error);
            }
            Action::AcquireHooks => Fed::HookAcquireFailed,
            Action::StartGuest => Fed::GuestStartFailed,
            Action::GiveBackHooks => Fed::HookGiveBackFailed,
            _ => return self.shared.tell(&Event::Warning(error.to_string())),
        };
        self.shared.note_error(error);
        self.shared.report(event);
    }

    /// Loader and lanes start when the last channel has come.
    fn start_loading(&mut self, driver: &Driver<Destination>) {
        if !self.threads.is_empty() || driver.inspect(Destination::state) != State::Active {
            return;
        }
        if let Some((since, _)) = self.lost.take() {
            self.shared.tell(&Event::Reconnected { took: since.elapsed(), resent_bytes: 0 });
        }
        for inbox in self.shared.streams.all() {
            let shared = Arc::clone(&self.shared);
            self.start(&format!("load {}", inbox.device.name), move || streams::load(&shared, &inbox));
        }
        let lanes = if self.shared.file.is_some() { 0 } else { self.shared.places.lanes() };
        for index in 0..lanes {
            let shared = Arc::clone(&self.shared);
            self.start(&format!("lane {index}"), move || lane::receive(&shared, index));
        }
        if self.shared.file.is_some() {
            let shared = Arc::clone(&self.shared);
            self.start("loader", move || file::load(&shared));
        }
        if let Some(channel) = self.shared.places.main() {
            let shared = Arc::clone(&self.shared);
            self.start("loader", move || loader::load(&shared, &channel));
        }
    }

    fn start(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let died = move |error| {
            shared.fail(error);
            shared.nudge();
        };
        match threads::spawn(name, work, died) {
            Ok(thread) => self.threads.push(thread),
            Err(error) => self.shared.fail(error),
        }
    }

    fn perform(&mut self, driver: &Driver<Destination>, action: Action) {
        match action {
            Action::FinishLoading => self.finish_loading(driver),
            Action::AcquireHooks => self.acquire_hooks(driver),
            Action::SendPong => self.answer_prepare(),
            Action::StartGuest => self.start_guest(),
            Action::SayStarted => self.say_started(driver),
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
                    Some(follower) => self.begin_following(follower),
                    None => self.send(&ReturnMessage::Shut(code)),
                }
            }
            // Questions are answered where they are asked, on their own connection.
            Action::Answer(_) => {}
            Action::ReportHeld(why) => self.report_held(why),
            Action::StopLoading => self.stop_loading(),
            Action::Suspend => self.suspend(),
            Action::GiveBackHooks => self.give_back_hooks(),
            // Checkpoints come over them. They are closed when no more do.
            Action::CloseChannels if self.shared.is_followed() => {}
            Action::CloseChannels => self.close_channels(),
            Action::ResetMemory => self.reset(),
            Action::Finish(_) => {}
        }
    }

    fn finish_loading(&mut self, driver: &Driver<Destination>) {
        match self.await_completion(driver) {
            Ok(wants_to_run) => {
                let run = wants_to_run && self.shared.autostart.read();
                self.shared.report(Fed::LoadComplete { run });
            }
            Err(Break::Interrupted) => {}
            Err(Break::Failed(error)) => self.shared.fail(error),
        }
    }

    /// Waits until all is loaded, and checks it. Gives whether the guest ran at the source.
    fn await_completion(&self, driver: &Driver<Destination>) -> Result<bool, Break> {
        self.wait_for_streams(driver)?;
        // The last of guest memory has come: from here on it is checked, and then the guest's.
        if let Some(rdma) = &self.shared.rdma {
            rdma.end_writes()?;
        }
        self.shared.rounds.complete()?;
        let wants_to_run = match self.shared.postcopy.arriving() {
            Some(_) => self.shared.target.finish_devices()?,
            None => self.shared.target.finish_loading()?,
        };
        self.check_memory()?;
        Ok(wants_to_run)
    }

    /// Waits until every device's stream is loaded, as long as anything moves.
    fn wait_for_streams(&self, driver: &Driver<Destination>) -> Result<(), Break> {
        let streams = &self.shared.streams;
        let stall = self.shared.params.limits.stall;
        let is_alone = !self.shared.capabilities.multifd || self.shared.file.is_some();
        if is_alone {
            // All of the main channel was read.
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

    fn acquire_hooks(&mut self, driver: &Driver<Destination>) {
        for hook in self.shared.target.hooks().into_iter().skip(self.acquired.len()) {
            let name = hook.name();
            let acquired = tried(&format!("Hook::acquire of {name}"), || hook.acquire());
            if let Err(error) = acquired {
                if matches!(error, MigrationError::Panicked { .. }) {
                    // Perhaps it holds something anyway, which the source is about to take back.
                    self.give_back(hook.as_ref());
                }
                if !self.is_lost_soon(driver) {
                    self.shared.note_error(error);
                }
                return self.shared.report(Fed::HookAcquireFailed);
            }
            self.acquired.push(hook);
        }
        self.left_held = false;
        self.shared.report(Fed::HooksAcquired);
    }

    /// A hook could not be acquired. A source that has lost the connection takes its hooks back, and comes again; it closes its
    /// channels before: whether that is so is heard here.
    fn is_lost_soon(&self, driver: &Driver<Destination>) -> bool {
        let may_be = |machine: &Destination| machine.would_suspend() || machine.state() == State::Suspending;
        // What is to be done about it is an action.
        driver.inspect(may_be) && !matches!(driver.wait(CLOSING, || None::<()>), Waited::TimedOut)
    }

    /// One that cannot be given back keeps no other from it.
    fn give_back_hooks(&mut self) {
        while let Some(hook) = self.acquired.pop() {
            self.give_back(hook.as_ref());
        }
        let event = if self.left_held { Fed::HookGiveBackFailed } else { Fed::HooksGivenBack };
        self.shared.report(event);
    }

    fn give_back(&mut self, hook: &dyn Hook) {
        let given_back = caught("Hook::give_back", || {
            call(format!("Hook::give_back of {}", hook.name()), || hook.give_back());
        });
        if let Err(error) = given_back {
            self.shared.tell(&Event::Warning(error.to_string()));
            self.left_held = true;
        }
    }

    /// The last moment at which the source's guest can run on: from the answer on, the source may let go of it.
    fn answer_prepare(&mut self) {
        match self.check_memory() {
            Ok(()) => self.send(&ReturnMessage::Pong(extension::PREPARE_PING)),
            Err(error) => self.shared.fail(error),
        }
    }

    /// A page may have failed after its bytes came: the VMM says so at any time.
    fn check_memory(&self) -> Result<(), MigrationError> {
        self.shared.target.guest().map_or(Ok(()), MigrationError::check_memory)
    }

    fn start_guest(&mut self) {
        // Nobody else has the guest, and this was tried before: without a device that is dead it is better off than
        // nowhere.
        if let Err(error) = self.shared.target.keep_memory() {
            self.start_has_failed = true;
            self.shared.note_error(error);
            return self.shared.report(Fed::GuestStartFailed);
        }
        let devices = if self.start_has_failed {
            for error in self.shared.streams.run_devices_that_can() {
                let text = format!("the guest runs without one of its devices: {error}");
                self.shared.tell(&Event::Warning(text));
            }
            Ok(())
        } else {
            self.shared.streams.run_devices()
        };
        match devices.and_then(|()| tried("TargetVm::start", || self.shared.target.start())) {
            Ok(()) => {
                if self.shared.target.runs_guests() {
                    self.shared.tell(&Event::Resumed);
                }
                self.shared.report(Fed::GuestStarted);
            }
            Err(error) => {
                // The source may run the guest again: no device of this side may.
                for error in self.shared.streams.stop_devices() {
                    self.shared.tell(&Event::Warning(error.to_string()));
                }
                self.start_has_failed = true;
                self.shared.note_error(error);
                self.shared.report(Fed::GuestStartFailed);
            }
        }
    }

    /// Once, and before the peer is told; without a return path there is nobody to tell.
    fn take_over_if_paused(&mut self, driver: &Driver<Destination>) {
        if self.taken_over || !driver.inspect(Destination::is_taken_over_paused) {
            return;
        }
        self.taken_over = true;
        if let Err(error) = self.shared.target.keep_memory() {
            self.shared.tell(&Event::Warning(format!("the guest has arrived and is paused, but: {error}")));
        }
        if let Err(error) = tried("TargetVm::take_over_paused", || self.shared.target.take_over_paused()) {
            self.shared.tell(&Event::Warning(format!("the guest has arrived and is paused, but: {error}")));
        }
        self.shared.guest_is(Custody::Arriving { is_free: true });
    }

    fn announce(&mut self) {
        for hook in self.shared.target.hooks() {
            if let Err(error) = tried("Hook::announce", || hook.announce()) {
                self.shared.tell(&Event::Warning(format!("{} was not announced: {error}", hook.name())));
            }
        }
    }

    /// A message that cannot be sent is no failure of ours: the source will ask.
    fn send(&mut self, message: &ReturnMessage) {
        if let Err(error) = self.shared.say(message) {
            tracing::debug!(%error, ?message, "return path");
        }
    }

    /// SHUT 0 and READY in one write: between them the primary's guest stands.
    fn begin_following(&self, follower: &dyn Follower) {
        follower.begin();
        let mut bytes = Vec::new();
        let encoded = ReturnMessage::Shut(0).encode(&mut bytes);
        let encoded = encoded.and_then(|()| Message::CheckpointReady.encode(&mut bytes));
        let said = encoded.map_err(MigrationError::wire("return path"));
        if let Err(error) = said.and_then(|()| self.shared.write_main(&bytes)) {
            follower.lost(error);
        }
    }

    fn report_held(&mut self, why: Held) {
        // What never runs a guest has nothing to wait for.
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
                "{}, and {} pages of the guest's memory are only there: the guest runs \
                 here until it needs one of them, and then waits. Keep both processes. The source goes on when it is told to \
                 (migrate with resume), and finds this side at {}; migrate-recover lets it come to another address",
                self.why_pages_do_not_come(),
                self.shared.postcopy.arriving().map_or(0, |arriving| arriving.left()),
                self.shared.address
            ),
            Held::Hooks | Held::Start => format!(
                "this side has the only copy of the guest and could not start it ({}): fix that, then cont; a device \
                 that still does not run is left out then",
                self.shared.error().map_or_else(|| "reason unknown".to_owned(), |error| error.to_string())
            ),
        };
        self.shared.tell(&Event::Warning(text));
    }

    fn why_pages_do_not_come(&self) -> String {
        let why = self.shared.error().map_or_else(|| "reason unknown".to_owned(), |error| error.to_string());
        match self.shared.postcopy.last_word() {
            Some(LastWord::Paused) => {
                "an operator ended the connection to the source (migrate-pause)".to_owned()
            }
            Some(LastWord::PageFailed) => format!(
                "a page of the guest could not be placed for the second time ({why}), so the source does not connect again by \
                 itself"
            ),
            None => format!("the connection to the source broke ({why})"),
        }
    }

    /// Ends lanes and loader. The main channel can still be written.
    fn stop_loading(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.rounds.stop();
        self.shared.streams.stop();
        self.shared.places.shut_lanes();
        // No guest runs: a device that is being loaded may wait for a page.
        self.shared.postcopy.shut_preempt();
        self.shared.postcopy.let_go();
        if let Some(main) = self.shared.places.main() {
            main.finish_reading();
        }
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
        self.shared.postcopy.join();
    }

    /// Lets the source finish: it may still be writing the description after EOF, and closing on bytes that
    /// nobody has read would break its connection before it has read SHUT.
    fn hear_the_source_out(&mut self) {
        if let Some(main) = self.shared.places.main() {
            main.set_own_stall_limit(Some(LAST_WORDS));
            // Fails only if the connection is gone already.
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

    /// A QEMU that has read SHUT says goodbye in TLS on every multifd channel, and if it cannot, believes that the
    /// migration failed: it would resume its guest.
    fn wait_for_ends(&self) {
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn close_channels(&mut self) {
        if !self.shared.stopping.load(Ordering::Acquire) {
            self.hear_the_source_out();
        } else if let Some(rdma) = &self.shared.rdma {
            // Loading was stopped: this side has failed.
            rdma.say_error();
        }
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.rounds.stop();
        self.shared.streams.stop();
        self.shared.places.end();
        self.shared.lobby.end();
        self.join();
        self.shared.close_rdma();
    }

    fn reset(&mut self) {
        // The source knows that it failed. After this the pages are gone.
        self.shared.find_failed_pages();
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
                    // An operator's wish is the reason, though a connection broke at the same time.
                    self.shared.forget_error();
                }
                self.shared.note_error(self.explain(cause));
                let error = self.shared.error().unwrap_or_else(|| self.explain(cause));
                // The source only hears that it failed: why is to be found here.
                tracing::warn!("incoming migration failed: {error}");
                Arrival::Failed(error)
            }
        };
        self.shared.guest_is(custody_after(&arrival));
        self.shared.end(arrival);
        let status = self.shared.status();
        self.shared.tell_status(status, &mut self.last_status);
    }

    /// The machine's cause in words, where no thread has a better one.
    fn explain(&self, cause: Cause) -> MigrationError {
        let limits = &self.shared.params.limits;
        match cause {
            Cause::TimedOut(State::Setup) => {
                MigrationError::Limit { what: "the start of loading".to_owned(), after: limits.setup }
            }
            Cause::TimedOut(state) => {
                MigrationError::Limit { what: format!("the end of {state:?}"), after: limits.prepare }
            }
            Cause::Abandoned => MigrationError::Cancelled,
            Cause::ConnectionLost | Cause::NotResumed => {
                MigrationError::Transport("the connection was lost".to_owned(), None)
            }
            Cause::PeerMisbehaved => {
                MigrationError::PeerMisbehaved { what: "an element came at a forbidden time".to_owned() }
            }
            Cause::LocalFailure | Cause::HookAcquire | Cause::GuestStart => {
                MigrationError::Internal(format!("failed for an unrecorded reason: {cause:?}"))
            }
        }
    }
}
