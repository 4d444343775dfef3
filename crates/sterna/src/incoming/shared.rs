//! What the threads of one incoming migration share.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_proto::MigrationId;
use sterna_proto::destination::{Config, Destination, Event as Fed, Refusal, State};
use sterna_ram::{Custody, CustodyClaim};
use sterna_transport::{Address, CancelFlag, Channel, ChannelGroup};
use sterna_wire::extension::{Features, MigrationSecret};
use sterna_wire::main::Expectations;

use super::arrival::{Arrival, status_of};
use super::arriving::Postcopy;
use super::autostart::Autostart;
use super::coming_memory::ComingMemory;
use super::greeting::Greetings;
use super::load_file::LoadFile;
use super::places::Places;
use super::rdma::state::Rdma;
use super::rounds::Rounds;
use super::streams::inboxes::Inboxes;
use super::target::{Layout, Target};
use crate::driver::Driver;
use crate::error::{Fault, MigrationError};
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
    /// Where it listens.
    pub address: Address,
    /// The file, where the guest comes out of one.
    pub file: Option<LoadFile>,
    /// What there is beside the channel where the guest comes over RDMA.
    pub rdma: Option<Arc<Rdma>>,
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub observer: Arc<dyn Observer>,
    /// What this migration says of who has the VM's guest; none where no VM takes it.
    custody: Option<Arc<CustodyClaim>>,
    /// Made when all channels have come: until then there is no migration.
    driver: OnceLock<Driver<Destination>>,
    /// Once RAM's blocks are known.
    layout: OnceLock<Layout>,
    pub rounds: Rounds,
    /// Devices' streams.
    pub streams: Inboxes,
    /// Ends accepting, for good.
    pub closing: CancelFlag,
    /// Lanes and loader are to stop: what they find from now on is no news.
    pub stopping: AtomicBool,
    /// Connections that have not said yet what they are for.
    pub greetings: Greetings,
    /// No further connection can come.
    pub no_more_come: AtomicBool,
    /// Why the last connection was refused.
    pub last_refusal: Mutex<Option<MigrationError>>,
    /// All channels that have come: what is silent, and for how long, is judged by them together.
    pub group: Arc<ChannelGroup>,
    /// Channels that came so far.
    pub places: Places,
    /// A multifd channel that had no place here and may be the source's.
    unplaced: Mutex<Option<String>>,
    /// Where a source comes whose connection was lost.
    pub lobby: Lobby,
    /// How it was lost.
    pub lost: Mutex<Option<MigrationError>>,
    /// Memory that comes as descriptors.
    pub memory: Mutex<ComingMemory>,
    /// Memory that comes while the guest runs.
    pub postcopy: Postcopy,
    /// RAM's section has come.
    pub ram_has_begun: AtomicBool,
    /// The migration's id and the secret that came with it.
    pub secret: Mutex<Option<(MigrationId, MigrationSecret)>>,
    /// Whole messages of the return path are written under it.
    pub returning: Mutex<()>,
    /// Whether the guest shall start when it is here.
    pub autostart: Autostart,
    pub received_bytes: AtomicU64,
    pub normal_pages: AtomicU64,
    pub zero_pages: AtomicU64,
    error: Mutex<Option<MigrationError>>,
    arrival: Mutex<Option<Arrival>>,
    changed: Condvar,
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
            rdma: None,
            rounds: Rounds::new(lanes),
            streams: Inboxes::new(Streamed::of(&target.devices()), params.max_queued_stream_bytes),
            driver: OnceLock::new(),
            closing: CancelFlag::new(),
            stopping: AtomicBool::new(false),
            greetings: Greetings::beside(1 + lanes + usize::from(capabilities.postcopy_preempt)),
            no_more_come: AtomicBool::new(false),
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
            autostart: Autostart::default(),
            received_bytes: AtomicU64::new(0),
            normal_pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
            error: Mutex::default(),
            arrival: Mutex::default(),
            changed: Condvar::new(),
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

    /// What this side can do beyond QEMU's format, as the migration is set.
    pub(super) fn features(&self) -> Features {
        let mut features = Features::OURS;
        if self.capabilities.postcopy_ram {
            features = features.union(Features::POSTCOPY);
            if self.places.lanes() > 0 {
                features = features.union(Features::POSTCOPY_LANES);
            }
        }
        if self.capabilities.postcopy_preempt {
            features = features.union(Features::PREEMPT);
        }
        if self.can_wait() {
            features = features.union(Features::RECONNECT);
        }
        features
    }

    /// What the main channel has to agree with.
    pub(super) fn expectations(&self) -> Expectations {
        Expectations { rdma: self.rdma.is_some(), ..self.target.expectations(&self.capabilities) }
    }

    /// Where pages go, once RAM's blocks are known.
    pub(super) fn layout(&self) -> Result<&Layout, MigrationError> {
        let missing = || MigrationError::Internal("RAM's blocks are unknown yet".to_owned());
        self.layout.get().ok_or_else(missing)
    }

    /// RAM's blocks are known: lanes may begin.
    pub(super) fn set_layout(&self, layout: Layout) {
        let layout = self.layout.get_or_init(|| layout);
        self.rounds.begin(&layout.ram);
    }

    /// The sink of lane `lane`; that after the last lane's is the main channel's.
    pub(super) fn sink(&self, lane: usize) -> Result<&Arc<dyn PageSink>, MigrationError> {
        let missing = || MigrationError::Internal(format!("there is no sink for lane {lane}"));
        self.layout()?.sinks.get(lane).ok_or_else(missing)
    }

    /// The machine; made now if there is none, since all channels have come. `None` when the migration was
    /// given up before.
    pub(super) fn begin(&self) -> Option<&Driver<Destination>> {
        // One decision with `end_before_it_began`: whoever holds this lock comes first.
        let arrival = self.arrival.lock();
        if arrival.is_some() && self.driver.get().is_none() {
            return None;
        }
        let driver = self.driver.get_or_init(|| {
            let config = Config {
                // An operator may say otherwise until all is loaded: see `Autostart`.
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
                // A guest that is taken over paused is free when the VM has taken it: see `guest_is`.
                let Some(custody) = custody.as_ref().filter(|_| !machine.is_taken_over_paused()) else {
                    return;
                };
                // An event that changes nothing must not take back what others have said since.
                // Whoever stopped a guest that waits for a page would wait with it.
                let is_paused = matches!(machine.state(), State::PostcopyPaused | State::PostcopyRecover);
                let is_free = machine.may_guest_run() && !is_paused;
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

    /// Ends a migration that has not begun, for `why`. False: it has.
    pub(super) fn end_before_it_began(&self, why: MigrationError) -> bool {
        let mut arrival = self.arrival.lock();
        if self.driver.get().is_some() {
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
        self.close_rdma();
        self.changed.notify_all();
        true
    }

    /// Nothing is written to guest memory over RDMA any more, and none of it is registered.
    pub(super) fn close_rdma(&self) {
        if let Some(rdma) = &self.rdma {
            rdma.close();
        }
    }

    /// Says who has the guest, where the machine alone does not tell.
    pub(super) fn guest_is(&self, custody: Custody) {
        if let Some(claim) = &self.custody {
            claim.set(custody);
        }
    }

    pub(super) fn driver(&self) -> Option<&Driver<Destination>> {
        self.driver.get()
    }

    /// Waits until there is a migration; `None` when there will be none.
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

    /// As [`Shared::feed`], for events that a machine never refuses from a sound engine.
    pub(super) fn report(&self, event: Fed) {
        if let Err(refusal) = self.feed(event) {
            tracing::error!(%refusal, "the handover machine refused an event");
            self.note_error(MigrationError::Internal(refusal.to_string()));
        }
    }

    /// RAM's section has come.
    pub(super) fn note_ram_has_begun(&self) {
        self.ram_has_begun.store(true, Ordering::Release);
    }

    /// Whether RAM's section has come.
    pub(super) fn ram_has_begun(&self) -> bool {
        self.ram_has_begun.load(Ordering::Acquire)
    }

    /// Whether lanes and loader are to stop.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Something that the control thread may wait for has changed.
    pub(super) fn nudge(&self) {
        if let Some(driver) = self.driver() {
            driver.nudge();
        }
    }

    /// Something failed. The first reason is the one that is reported.
    pub(super) fn fail(&self, error: MigrationError) {
        if self.stopping.load(Ordering::Acquire) {
            return;
        }
        // The handover is over: what fails now ends the following, and changes nothing of what is held.
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
        if event == Fed::ConnectionLost
            && self.driver().is_some_and(|driver| driver.inspect(Destination::would_suspend))
        {
            // No reason to fail, if the source comes back in time.
            self.note_lost(error);
            return self.report(event);
        }
        if !self.driver().is_some_and(|driver| driver.inspect(|machine| machine.state().is_final())) {
            self.note_error(error);
        }
        self.report(event);
        // No guest has run: who loads, or acquires, need not wait for a page that does not come any more.
        if self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::Failing)
            && let Some(arriving) = self.postcopy.arriving()
        {
            arriving.end();
        }
    }

    /// A multifd channel has no place here, and states what the source's would state.
    pub(super) fn note_unplaced(&self, why: String) {
        self.unplaced.lock().get_or_insert(why);
    }

    /// An error of the peer's may come of its channels that had no place here.
    fn explained(&self, error: MigrationError) -> MigrationError {
        let why = match error.fault() {
            None | Some(Fault::PeerMisbehaved) => self.unplaced.lock().clone(),
            _ => None,
        };
        match why {
            Some(why) => MigrationError::PeerIncompatible {
                what: format!("{error}; a multifd channel had been refused: {why}"),
            },
            None => error,
        }
    }

    /// RAM has ended: if a multifd channel was refused that may have been the source's, it must not have
    /// carried pages. Packets are numbered over all channels (specs/stream.md §3.4), so its numbers would be
    /// missing; and a source that has multifd channels sends no page on the main channel.
    pub(super) fn check_that_all_came(&self) -> Result<(), MigrationError> {
        let Some(why) = self.unplaced.lock().clone() else { return Ok(()) };
        let came = match self.places.lanes() {
            0 => self.normal_pages.load(Ordering::Relaxed) > 0,
            _ => self.rounds.numbers_are_complete(),
        };
        if came {
            return Ok(());
        }
        Err(MigrationError::PeerIncompatible {
            what: format!("pages are missing, and a multifd channel had been refused: {why}"),
        })
    }

    pub(super) fn note_error(&self, error: MigrationError) {
        error.note(&self.error, self.layout.get().map(|layout| &layout.ram));
    }

    /// What has failed is over: the next reason counts.
    pub(super) fn forget_error(&self) {
        *self.error.lock() = None;
    }

    /// Finds out which pages have failed, if it failed because of some that nobody named.
    pub(super) fn find_failed_pages(&self) {
        if let Some(ram) = self.target.guest() {
            MigrationError::find_pages(&self.error, ram);
        }
    }

    /// The first error is no longer all that is to be said: what came lies in `place`.
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

    /// A channel of the migration has come: from now on its silence is that of the migration, and the kernel finds
    /// out whether the source's machine is still there, since a source may have nothing to say for a long time.
    pub(super) fn begin_waiting_for(&self, channel: &Channel) {
        let limit = self.params.limits.stall;
        channel.join(&self.group);
        channel.set_stall_limit(Some(limit));
        channel.probe_peer(limit);
    }

    /// From now on reading the main channel is told of its silence after `limit`, whatever comes on the others.
    pub(super) fn look_up_from_main_after(&self, limit: Duration) {
        if let Some(main) = self.places.main() {
            main.set_own_stall_limit(Some(limit));
        }
    }

    /// From now on the main channel's silence is that of the migration again.
    pub(super) fn wait_for_main(&self) {
        if let Some(main) = self.places.main() {
            main.set_stall_limit(Some(self.params.limits.stall));
        }
    }

    /// Whether a standby follows the source's guest: SHUT and READY have gone out.
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
    }

    /// Tells the observer which states were passed. Control thread only, so that the order holds.
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

    /// What is shown of a state as long as its actions are not all performed: a failed destination still has to
    /// be undone, and until then must not look free.
    fn unfinished(&self, state: State) -> Status {
        match state {
            State::Failed => Status::Failing,
            State::Running | State::Paused if self.postcopy.arriving().is_some() => Status::PostcopyActive,
            State::Running | State::Paused => Status::Active,
            state => status_of(state),
        }
    }

    pub(super) fn status(&self) -> Status {
        match (self.driver(), &*self.arrival.lock()) {
            (Some(driver), Some(_)) => status_of(driver.inspect(Destination::state)),
            (Some(driver), None) => self.unfinished(driver.inspect(Destination::state)),
            (None, Some(_)) => Status::Failed,
            (None, None) => Status::Setup,
        }
    }

    pub(super) fn statistics(&self) -> IncomingStatistics {
        let status = self.status();
        IncomingStatistics {
            status,
            // A connection that broke after the commit is no failure.
            error: self.error().filter(|_| status != Status::Completed).map(|error| error.to_string()),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            normal_pages: self.normal_pages.load(Ordering::Relaxed),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            cleared_pages: self.target.cleared_pages(),
            streams: self.streams.statistics(),
            rdma: self.rdma.as_ref().map(|rdma| rdma.statistics()),
            postcopy: self.postcopy.statistics(),
        }
    }

    /// An operator gives it up, before or after it has begun; with `held` also a guest that is held.
    pub(super) fn abandon(&self, held: bool) -> Result<(), Refusal> {
        if self.end_before_it_began(MigrationError::Cancelled) {
            return Ok(());
        }
        // A refused one must not hide what else is wrong.
        self.feed(if held { Fed::Discard } else { Fed::Abandon })
            .map(|()| self.note_error(MigrationError::Cancelled))
    }

    /// The last handle is gone.
    pub(super) fn close(&self) {
        self.closing.cancel();
        // A held guest may be the only copy: it stays loaded, for the VMM to start. Refused when all is over,
        // and that is well.
        let is_held = |driver: &Driver<Destination>| driver.inspect(Destination::state) == State::Held;
        if !self.end_before_it_began(MigrationError::Cancelled) && !self.driver().is_some_and(is_held) {
            let _ = self.feed(Fed::Abandon);
        }
        if let Some(follower) = self.target.follower() {
            follower.end();
        }
        self.greetings.end();
        self.changed.notify_all();
    }

    pub(super) fn end(&self, arrival: Arrival) {
        self.arrival.lock().get_or_insert(arrival);
        self.changed.notify_all();
    }

    pub(super) fn arrival(&self) -> Option<Arrival> {
        self.arrival.lock().clone()
    }

    pub(super) fn wait(&self) -> Arrival {
        let mut arrival = self.arrival.lock();
        loop {
            if let Some(arrival) = &*arrival {
                return arrival.clone();
            }
            self.changed.wait(&mut arrival);
        }
    }
}
