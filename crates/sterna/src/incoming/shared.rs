//! State that the threads of one incoming migration share.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_proto::MigrationId;
use sterna_proto::destination::{Config, Destination, Event as Fed, Refusal, State};
use sterna_ram::{Custody, CustodyClaim};
use sterna_transport::{Address, CancelFlag, Channel, ChannelGroup};
use sterna_wire::extension::MigrationSecret;
use sterna_wire::main::Expectations;

use super::arrival::{Arrival, status_of};
use super::arriving::Postcopy;
use super::autostart::Autostart;
use super::awaited_vm::Configuring;
use super::carrier::{Carrier, Plain};
use super::coming_memory::ComingMemory;
use super::greeting::Greetings;
use super::load_file::LoadFile;
use super::places::Places;
use super::rounds::Rounds;
use super::streams::inboxes::Inboxes;
use super::target::{Layout, Target};
use crate::bell::Bell;
use crate::driver::Driver;
use crate::error::{Difference, Fault, MigrationError, RefusedLane};
use crate::events::{Event, Observer, Status};
use crate::limits::machine_limits;
use crate::pages::PageSink;
use crate::params::{Capabilities, Parameters};
use crate::reconnect::Lobby;
use crate::stats::IncomingStatistics;
use crate::streams::Streamed;
use crate::threads;

pub(super) struct Shared {
    pub target: Arc<dyn Target>,
    /// The address of the listener.
    pub address: Address,
    /// The file, if the guest is loaded from one.
    pub file: Option<LoadFile>,
    /// The transport of the migration.
    pub carrier: Arc<dyn Carrier>,
    /// Another connection can arrive at the address, so a lost one can be replaced.
    pub can_be_dialled_again: bool,
    /// `Some` in the state that waits for the source's configuration, without a VM. The migration itself has another.
    pub configuring: Option<Configuring<Self>>,
    /// The only connection that may become the main channel: the one whose configuration made the VM.
    pub only_main: OnceLock<Arc<Channel>>,
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub observer: Arc<dyn Observer>,
    /// This migration's claim on the VM's guest. `None` if the guest does not arrive in a VM.
    custody: Option<Arc<CustodyClaim>>,
    /// Created when all channels have connected. Until then no migration has begun.
    driver: OnceLock<Driver<Destination>>,
    /// Set once RAM's blocks are known.
    layout: OnceLock<Layout>,
    pub rounds: Rounds,
    /// The inboxes of device streams.
    pub streams: Inboxes,
    /// Ends the acceptance of connections permanently.
    pub closing: CancelFlag,
    /// Lanes and loader must stop. Their errors from now on are not reported.
    pub stopping: AtomicBool,
    /// Connections that have not identified themselves yet.
    pub greetings: Greetings,
    /// No further connection is possible.
    pub no_more_come: Arc<AtomicBool>,
    /// Why the last connection was refused.
    pub last_refusal: Mutex<Option<MigrationError>>,
    /// All channels of the migration. Silence is measured over all of them together.
    pub group: Arc<ChannelGroup>,
    /// The assignment of connections to the migration's channels.
    pub places: Places,
    /// Why a multifd channel that may be the source's was refused.
    unplaced: Mutex<Option<RefusedLane>>,
    /// The place where the channels of a reconnecting source assemble.
    pub lobby: Lobby,
    /// Why the connection was lost.
    pub lost: Mutex<Option<MigrationError>>,
    /// State of memory that arrives as descriptors.
    pub memory: Mutex<ComingMemory>,
    /// State of memory that arrives while the guest runs.
    pub postcopy: Postcopy,
    /// RAM's section was read.
    pub ram_has_begun: AtomicBool,
    /// The migration's id, and the secret that the source sent with it.
    pub secret: Mutex<Option<(MigrationId, MigrationSecret)>>,
    /// Locked while whole messages of the return path are written.
    pub returning: Mutex<()>,
    /// The decision whether the guest starts when it has arrived.
    pub autostart: Arc<Autostart>,
    pub received_bytes: AtomicU64,
    pub normal_pages: AtomicU64,
    pub zero_pages: AtomicU64,
    /// Why the last start of the guest failed.
    pub start_error: Mutex<Option<MigrationError>>,
    error: Mutex<Option<MigrationError>>,
    pub arrival: Mutex<Option<Arrival>>,
    pub changed: Condvar,
    /// The eventfds of VMMs that have an event loop.
    pub bell: Arc<Bell>,
    /// When a source last asked for the result.
    pub asked: Arc<Mutex<Option<Instant>>>,
}

impl Shared {
    pub(super) fn new(
        (target, custody): (Arc<dyn Target>, Option<CustodyClaim>),
        address: Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, MigrationError> {
        // In a file, multifd channels are threads.
        let has_channels = capabilities.multifd && !capabilities.mapped_ram;
        let lanes = if has_channels { usize::from(params.multifd_channels) } else { 0 };
        let shared = Self {
            custody: custody.map(Arc::new),
            layout: OnceLock::new(),
            file: None,
            carrier: Arc::new(Plain),
            can_be_dialled_again: false,
            configuring: None,
            only_main: OnceLock::new(),
            rounds: Rounds::new(lanes),
            streams: Inboxes::new(Streamed::of(&target.devices()), params.max_queued_stream_bytes),
            driver: OnceLock::new(),
            closing: CancelFlag::new(),
            stopping: AtomicBool::new(false),
            greetings: Greetings::beside(1 + lanes + usize::from(capabilities.postcopy_preempt)),
            no_more_come: Arc::default(),
            last_refusal: Mutex::default(),
            places: Places::new(lanes),
            lobby: Lobby::new(lanes),
            lost: Mutex::default(),
            unplaced: Mutex::default(),
            memory: Mutex::default(),
            postcopy: Postcopy::default(),
            ram_has_begun: AtomicBool::new(false),
            secret: Mutex::default(),
            group: ChannelGroup::new(),
            returning: Mutex::new(()),
            autostart: Arc::default(),
            received_bytes: AtomicU64::new(0),
            normal_pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
            start_error: Mutex::default(),
            error: Mutex::default(),
            arrival: Mutex::default(),
            changed: Condvar::new(),
            bell: Arc::default(),
            asked: Arc::default(),
            target,
            address,
            params,
            capabilities,
            observer,
        };
        if let Some(layout) = shared.target.known_layout(lanes)? {
            shared.set_layout(layout);
        }
        Ok(shared)
    }

    /// The properties that the main channel must match.
    pub(super) fn expectations(&self) -> Expectations {
        Expectations { rdma: self.carrier.writes_pages(), ..self.target.expectations(&self.capabilities) }
    }

    /// The places of pages, once RAM's blocks are known.
    pub(super) fn layout(&self) -> Result<&Layout, MigrationError> {
        let missing = || MigrationError::Internal("RAM's blocks are unknown yet".to_owned());
        self.layout.get().ok_or_else(missing)
    }

    /// Stores the layout and lets lanes begin, because RAM's blocks are known.
    pub(super) fn set_layout(&self, layout: Layout) {
        let layout = self.layout.get_or_init(|| layout);
        self.rounds.begin(&layout.ram);
    }

    /// The sink of lane number `lane`. The number after the last lane is the main channel's sink.
    pub(super) fn sink(&self, lane: usize) -> Result<&Arc<dyn PageSink>, MigrationError> {
        let missing = || MigrationError::Internal(format!("there is no sink for lane {lane}"));
        self.layout()?.sinks.get(lane).ok_or_else(missing)
    }

    /// The machine, created now if it does not exist, because all channels have connected. `None` if the
    /// migration was given up before.
    pub(super) fn begin(&self) -> Option<&Driver<Destination>> {
        // Decided under the same lock as `end_before_it_began`, so that exactly one of the two takes effect.
        let arrival = self.arrival.lock();
        if arrival.is_some() && self.driver.get().is_none() {
            return None;
        }
        let driver = self.driver.get_or_init(|| {
            let config = Config {
                // An operator can change this until everything is loaded: see `Autostart`.
                autostart: true,
                managed: !self.capabilities.unmanaged && self.file.is_none(),
                limits: sterna_proto::Limits {
                    reconnect: self.comeback_limit(),
                    ..machine_limits(&self.params.limits)
                },
            };
            let custody = self.custody.clone();
            let told = Cell::new(None);
            Driver::new(Destination::new(config, Duration::ZERO), move |machine| {
                // Without postcopy, a guest that is taken over paused is free only when the VM has taken it:
                // see `guest_is`.
                let Some(custody) = custody.as_ref().filter(|_| machine.state() != State::Paused) else {
                    return;
                };
                // Only changes are reported: an event without a change must not overwrite a custody that
                // another thread has set since.
                // While pages are missing, the guest is not free: code that stops a guest that waits for a page
                // would wait as well.
                let lacks_pages = matches!(machine.state(), State::PostcopyPaused | State::PostcopyRecover);
                let is_free = machine.may_guest_run() && (!lacks_pages || machine.is_taken_over_paused());
                let now = Custody::Arriving { is_free };
                if told.replace(Some(now)) != Some(now) {
                    custody.set(now);
                }
            })
        });
        drop(arrival);
        self.changed.notify_all();
        Some(driver)
    }

    /// Ends a migration that has not begun, because of `why`. False: it has begun.
    pub(super) fn end_before_it_began(&self, why: MigrationError) -> bool {
        let mut arrival = self.arrival.lock();
        if self.driver.get().is_some() || self.successor().is_some() {
            return false;
        }
        if arrival.is_none() {
            *arrival = Some(Arrival::Failed(why.clone()));
            if let Some(custody) = &self.custody {
                custody.give_back();
            }
        }
        drop(arrival);
        self.note_error(why);
        self.places.end();
        self.carrier.close();
        if let Some(configuring) = &self.configuring {
            configuring.wake(true);
        }
        self.changed.notify_all();
        self.bell.ring();
        true
    }

    /// Sets the guest's custody where the machine's state is not sufficient.
    pub(super) fn guest_is(&self, custody: Custody) {
        if let Some(claim) = &self.custody {
            claim.set(custody);
        }
    }

    pub(super) fn driver(&self) -> Option<&Driver<Destination>> {
        self.driver.get()
    }

    /// Whether pages of the guest arrive after its start.
    pub(super) fn gets_pages_later(&self) -> bool {
        self.postcopy.arriving().is_some()
    }

    /// Waits until the migration begins. `None`: it will not begin.
    pub(super) fn wait_for_migration(&self) -> Option<&Driver<Destination>> {
        let mut arrival = self.arrival.lock();
        loop {
            if let Some(driver) = self.driver.get() {
                return Some(driver);
            }
            if self.closing.is_cancelled() || arrival.is_some() {
                return None;
            }
            self.changed.wait_for(&mut arrival, Duration::from_millis(50));
        }
    }

    pub(super) fn feed(&self, event: Fed) -> Result<(), Refusal> {
        let Some(driver) = self.driver() else {
            return Err(Refusal::NotHeld { state: State::Setup });
        };
        driver.feed(event).map(drop)
    }

    /// As [`Shared::feed`], for events that the machine accepts at any time from a correct engine.
    pub(super) fn report(&self, event: Fed) {
        if let Err(refusal) = self.feed(event) {
            tracing::error!(%refusal, "the handover machine refused an event");
            self.note_error(MigrationError::Internal(refusal.to_string()));
        }
    }

    /// Records that RAM's section was read.
    pub(super) fn note_ram_has_begun(&self) {
        self.ram_has_begun.store(true, Ordering::Release);
    }

    /// Whether RAM's section was read.
    pub(super) fn ram_has_begun(&self) -> bool {
        self.ram_has_begun.load(Ordering::Acquire)
    }

    /// Whether lanes and loader must stop.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Wakes the control thread, because a condition that it waits for may have changed.
    pub(super) fn nudge(&self) {
        if let Some(driver) = self.driver() {
            driver.nudge();
        }
    }

    /// Reports an error. The first error is the one that the operator sees.
    pub(super) fn fail(&self, error: MigrationError) {
        if self.stopping.load(Ordering::Acquire) {
            return;
        }
        // The handover is complete. An error now ends the stream of checkpoints, and does not affect the held
        // checkpoint.
        if let Some(follower) = self.target.follower().filter(|follower| follower.has_begun()) {
            let error = self.explained(error);
            tracing::debug!(%error, "following");
            return follower.lost(error);
        }
        let event = match error.fault() {
            Some(Fault::Local) => Fed::LocalFailure,
            Some(_) => Fed::PeerMisbehaved,
            None => Fed::ConnectionLost,
        };
        let error = self.explained(error);
        tracing::debug!(%error, "incoming migration");
        let is_suspended =
            |machine: &Destination| matches!(machine.state(), State::Suspending | State::Suspended);
        let at = self.driver().map(|driver| driver.inspect(|m| (is_suspended(m), m.would_suspend())));
        let (is_suspended, would_suspend) = at.unwrap_or_default();
        if is_suspended && event != Fed::LocalFailure {
            // Errors in the remaining data of a lost session are ignored, because the source reconnects.
            return;
        }
        if event == Fed::ConnectionLost && would_suspend {
            // Not an error yet, because the source may reconnect in time.
            self.note_lost(error);
            return self.report(event);
        }
        if !self.driver().is_some_and(|driver| driver.inspect(|machine| machine.state().is_final())) {
            self.note_error(error);
        }
        self.report(event);
        // No guest has run. Threads that load or acquire must not wait for a page that will not arrive.
        if self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::Failing)
            && let Some(arriving) = self.postcopy.arriving()
        {
            arriving.end();
        }
    }

    /// Records why a multifd channel was refused that names the same machine as the source.
    pub(super) fn note_unplaced(&self, why: RefusedLane) {
        self.unplaced.lock().get_or_insert(why);
    }

    /// Adds an earlier refusal of a multifd channel to an error of the peer. It may be the cause.
    fn explained(&self, error: MigrationError) -> MigrationError {
        let why = match error.fault() {
            None | Some(Fault::PeerMisbehaved) => self.unplaced.lock().clone(),
            _ => None,
        };
        match why {
            Some(why) => {
                let (error, why) = (Arc::new(error), Box::new(why));
                Difference::RefusedLane { error, why }.into()
            }
            None => error,
        }
    }

    /// At the end of RAM: if a refused multifd channel may have been the source's, checks that it carried no
    /// pages.
    ///
    /// Packets are numbered over all channels (specs/stream.md §3.4), so its numbers would be missing. A source
    /// with multifd channels sends no page on the main channel.
    pub(super) fn check_that_all_came(&self) -> Result<(), MigrationError> {
        let Some(why) = self.unplaced.lock().clone() else { return Ok(()) };
        let came = match self.places.lanes() {
            0 => self.normal_pages.load(Ordering::Relaxed) > 0,
            _ => self.rounds.numbers_are_complete(),
        };
        if came {
            return Ok(());
        }
        Err(Difference::PagesMissing(Box::new(why)).into())
    }

    pub(super) fn note_error(&self, error: MigrationError) {
        error.note(&self.error, self.layout.get().map(|layout| &layout.ram));
    }

    /// Forgets the error after a recovery, so that the next error is reported.
    pub(super) fn forget_error(&self) {
        *self.error.lock() = None;
    }

    /// Searches for pages that have failed, if the error does not name them.
    pub(super) fn find_failed_pages(&self) {
        if let Some(ram) = self.target.guest() {
            MigrationError::find_pages(&self.error, ram);
        }
    }

    /// Wraps the error: the data that arrived is kept in `place`.
    pub(super) fn note_kept(&self, place: PathBuf) {
        let mut error = self.error.lock();
        let why = error.take().unwrap_or_else(|| {
            MigrationError::Internal(
                "the machine could not be taken over, for an unrecorded reason".to_owned(),
            )
        });
        *error = Some(MigrationError::Kept { place, why: Arc::new(why) });
    }

    pub(super) fn error(&self) -> Option<MigrationError> {
        self.error.lock().clone()
    }

    /// Writes one message of the return path.
    pub(super) fn say(
        &self,
        message: &sterna_wire::return_path::ReturnMessage,
    ) -> Result<(), MigrationError> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).map_err(MigrationError::wire("return path"))?;
        self.write_main(&bytes)
    }

    /// Writes whole messages to the source.
    pub(super) fn write_main(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let Some(main) = self.places.main() else {
            return Err(MigrationError::Internal("there is no main channel to answer on".to_owned()));
        };
        let _whole = self.returning.lock();
        Ok(main.write_all(bytes)?)
    }

    /// Whether a standby receives the source's checkpoints: SHUT and READY were sent.
    pub(super) fn is_followed(&self) -> bool {
        self.target.follower().is_some_and(|follower| follower.has_begun())
    }

    pub(super) fn answer(&self, id: MigrationId) -> sterna_proto::Status {
        match self.driver() {
            Some(driver) => driver.inspect(|machine| machine.status(id)),
            None => sterna_proto::Status::Unknown,
        }
    }

    pub(super) fn tell(&self, event: &Event) {
        threads::tell(self.observer.as_ref(), event);
        self.bell.ring();
    }

    /// Reports the passed states to the observer. Called only by the control thread, so that the order is
    /// right.
    pub(super) fn tell_passed(&self, driver: &Driver<Destination>, last: &mut Option<Status>) {
        for state in driver.take_passed() {
            match state {
                State::Prepared => self.tell(&Event::Prepared),
                State::Committed => self.tell(&Event::Committed),
                _ => {}
            }
            self.tell_status(self.unfinished(state), last);
        }
    }

    pub(super) fn tell_status(&self, status: Status, last: &mut Option<Status>) {
        if *last != Some(status) {
            *last = Some(status);
            self.tell(&Event::Status(status));
        }
    }

    /// The status of a state whose actions are not complete. For example, a failed destination must still be
    /// reset, and must not look free until then.
    fn unfinished(&self, state: State) -> Status {
        match state {
            State::Failed => Status::Failing,
            // In postcopy, starting the guest may wait for a page.
            State::Committed if self.postcopy.arriving().is_some() => Status::PostcopyActive,
            State::Running | State::Paused if self.postcopy.arriving().is_some() => Status::PostcopyActive,
            State::Running | State::Paused => Status::Active,
            state => status_of(state),
        }
    }

    pub(super) fn status(&self) -> Status {
        if let Some(made) = self.successor() {
            return made.status();
        }
        match (self.driver(), &*self.arrival.lock()) {
            (Some(driver), Some(_)) => status_of(driver.inspect(Destination::state)),
            (Some(driver), None) => self.unfinished(driver.inspect(Destination::state)),
            (None, Some(_)) => Status::Failed,
            (None, None) => Status::Setup,
        }
    }

    pub(super) fn statistics(&self) -> IncomingStatistics {
        if let Some(made) = self.successor() {
            return made.statistics();
        }
        let status = self.status();
        IncomingStatistics {
            status,
            // A connection that broke after the commit is not a failure.
            error: self.error().filter(|_| status != Status::Completed).map(|error| error.to_string()),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            normal_pages: self.normal_pages.load(Ordering::Relaxed),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            cleared_pages: self.target.cleared_pages(),
            streams: self.streams.statistics(),
            rdma: self.carrier.statistics(),
            postcopy: self.postcopy.statistics(),
        }
    }
}
