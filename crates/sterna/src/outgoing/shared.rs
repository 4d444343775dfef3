//! State that the threads of one outgoing migration share.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_proto::source::{Event as Fed, Refusal, Source, State};
use sterna_ram::{Custody, CustodyClaim, GuestRam, TrackingClaim};
use sterna_transport::{Address, CancelFlag, Channel};

use super::asking::Asking;
use super::carrier::facts::Facts;
use super::guest_source::{GuestSource, PageReader};
use super::lanes::limiter::Limiter;
use super::lanes::state::Lanes;
use super::limits::status_of;
use super::measure::rdma_counts::RdmaCounts;
use super::measure::{Counters, LiveStatistics, Probes};
use super::outcome::{Outcome, Waited};
use super::postcopy::shared::SharedPostcopy;
use super::protection::Protecting;
use super::reconnection::shared::SharedReconnection;
use super::running_streams::RunningStreams;
use super::same_host;
use crate::bell::Bell;
use crate::driver::Driver;
use crate::error::{Fault, MigrationError};
use crate::events::{Event, Observer, Status};
use crate::hooks::Hook;
use crate::identity::Identity;
use crate::params::{Capabilities, MigrationMode, Parameters};
use crate::precopy::Recorded;
use crate::threads;
use crate::vm::SourceVm;

pub(super) struct Shared {
    pub guest: Guest,
    pub capabilities: Capabilities,
    pub params: Mutex<Parameters>,
    pub observer: Arc<dyn Observer>,
    pub driver: Driver<Source>,
    pub session: Session,
    pub measures: Measures,
    pub handover: HandoverShared,
    /// The pages that follow the guest in postcopy.
    pub postcopy: SharedPostcopy,
    pub reconnection: SharedReconnection,
    /// `Some` if the destination is a standby: checkpoints follow the seeding.
    pub protecting: Option<Arc<Protecting>>,
    /// The eventfds of VMMs that have an event loop.
    pub bell: Bell,
    ending: Ending,
}

/// The guest that is migrated.
pub(super) struct Guest {
    pub source: Arc<dyn GuestSource>,
    pub vm: Arc<dyn SourceVm>,
    /// The guest's RAM as it was when the migration began.
    pub ram: GuestRam,
}

/// The open connections, and the shared state of the threads that use them.
pub(super) struct Session {
    pub to: Address,
    /// What holds for this address.
    pub facts: &'static Facts,
    pub connecting: CancelFlag,
    pub limiter: Arc<Limiter>,
    pub lanes: Lanes,
    /// Device streams, after they have begun.
    pub streams: Mutex<Option<Arc<dyn RunningStreams>>>,
    /// The destination expects the memory as descriptors.
    pub memory_is_expected: AtomicBool,
    channels: Mutex<Vec<Arc<Channel>>>,
}

/// Measurements, and the policy that uses them.
pub(super) struct Measures {
    pub counters: Arc<Counters>,
    pub statistics: Mutex<LiveStatistics>,
    /// Pings that wait for their answer.
    pub probes: Mutex<Probes>,
    /// The precopy policy with a recording of its inputs; `None` before pages move.
    pub policy: Mutex<Option<Recorded>>,
    /// Counts of a source over RDMA.
    pub rdma: Arc<RdmaCounts>,
}

/// The custody of the guest, and the state that is restored if the guest stays.
pub(super) struct HandoverShared {
    /// Identifies and authenticates this migration when it asks the destination for its result.
    pub identity: Identity,
    /// The operator was informed of an answer that is not the destination's.
    pub told_of_forgery: AtomicBool,
    /// This migration's claim on the guest's custody.
    pub custody: Arc<CustodyClaim>,
    /// The destination gets descriptors of the guest's memory.
    hands_over_memory: bool,
    /// `Some` as long as this migration may use the dirty log.
    pub tracking: Arc<Mutex<Option<TrackingClaim>>>,
    /// Released hooks, in the order of their release.
    pub released: Mutex<Vec<Arc<dyn Hook>>>,
    /// The question to a destination whose acknowledgement was lost.
    pub asking: Mutex<Option<Asking>>,
}

/// The result of the migration.
#[derive(Default)]
struct Ending {
    error: Mutex<Option<MigrationError>>,
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(
        guest_source: Arc<dyn GuestSource>,
        (to, facts): (Address, &'static Facts),
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        (source, identity, custody, tracking): (Source, Identity, CustodyClaim, TrackingClaim),
    ) -> Self {
        let (vm, ram) = (Arc::clone(guest_source.vm()), guest_source.ram().clone());
        let (custody, tracking) = (Arc::new(custody), Arc::new(Mutex::new(Some(tracking))));
        let hands_over_memory = params.mode == MigrationMode::CprTransfer;
        let watch = {
            let (custody, tracking) = (Arc::clone(&custody), Arc::clone(&tracking));
            let stores = facts.stores;
            let told = Cell::new(None);
            move |machine: &Source| {
                if matches!(machine.state(), State::Cancelled | State::Failed) {
                    // Everything is undone: a thread that learns of the end may start another migration
                    // immediately.
                    *tracking.lock() = None;
                }
                // The custody may have been changed by others since. An event without effect must not overwrite
                // that.
                let now = match custody_of(machine, stores, custody.before()) {
                    // The custody is `Gone` only after this side has released its memory: see `tell_passed`.
                    Custody::Gone if hands_over_memory => Custody::Leaving { is_free: false },
                    now => now,
                };
                if told.replace(Some(now)) != Some(now) {
                    custody.set(now);
                }
            }
        };
        let lanes = if capabilities.multifd { usize::from(params.multifd_channels) } else { 1 };
        let rdma = Arc::<RdmaCounts>::default();
        let statistics = LiveStatistics::new(ram.total_bytes(), lanes as u32, Arc::clone(&rdma));
        Self {
            session: Session {
                connecting: CancelFlag::new(),
                limiter: Arc::new(Limiter::new(params.max_bandwidth_bytes)),
                lanes: Lanes::new(lanes),
                streams: Mutex::default(),
                memory_is_expected: AtomicBool::new(false),
                channels: Mutex::default(),
                to: to.clone(),
                facts,
            },
            measures: Measures {
                counters: Arc::default(),
                statistics: Mutex::new(statistics),
                probes: Mutex::default(),
                policy: Mutex::default(),
                rdma,
            },
            handover: HandoverShared {
                identity,
                told_of_forgery: AtomicBool::new(false),
                custody,
                hands_over_memory,
                tracking,
                released: Mutex::default(),
                asking: Mutex::default(),
            },
            postcopy: SharedPostcopy::new(params.max_postcopy_bandwidth_bytes),
            reconnection: SharedReconnection::new(to),
            params: Mutex::new(params),
            driver: Driver::new(source, watch),
            protecting: None,
            bell: Bell::default(),
            ending: Ending::default(),
            guest: Guest { source: guest_source, vm, ram },
            capabilities,
            observer,
        }
    }

    /// A reader of pages for one lane.
    pub(super) fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        match &self.protecting {
            Some(protecting) => Ok(protecting.reader()),
            None => self.guest.source.reader(),
        }
    }

    pub(super) fn params(&self) -> Parameters {
        self.params.lock().clone()
    }

    /// Feeds an event to the machine. When the machine undoes, no thread may continue to wait for the peer.
    pub(super) fn feed(&self, event: Fed) -> Result<(), Refusal> {
        self.feed_unless(event, |_| None)
    }

    /// Feeds an event, unless `refuse` refuses it in the machine's present state.
    pub(super) fn feed_unless(
        &self,
        event: Fed,
        refuse: impl FnOnce(State) -> Option<Refusal>,
    ) -> Result<(), Refusal> {
        let state = self.driver.feed_unless(event, refuse)?;
        match state {
            // If nothing has to be undone, for example while channels are being connected, the machine reaches
            // its last state immediately. The thread that closes the channels would still wait for the peer.
            State::Cancelling | State::Failing | State::Cancelled | State::Failed => self.interrupt(),
            // The thread that reports the loss belongs to the session, and is joined before another session
            // begins.
            State::Suspending if event == Fed::ConnectionLost => self.break_session(),
            _ => {}
        }
        Ok(())
    }

    /// Feeds an event that the machine refuses only after an error of the engine.
    pub(super) fn report(&self, event: Fed) {
        if let Err(refusal) = self.feed(event) {
            tracing::error!(%refusal, "the handover machine refused an event");
            self.note_error(MigrationError::Internal(refusal.to_string()));
        }
    }

    /// Reports a failure. The first reason is kept.
    ///
    /// A closed channel is no failure while the migration is being undone or after it has ended.
    pub(super) fn fail(&self, error: MigrationError) {
        let state = self.driver.inspect(Source::state);
        if state.is_final() || matches!(state, State::Cancelling | State::Failing | State::Held) {
            return;
        }
        if let (Some(protecting), State::Protected) = (&self.protecting, state) {
            // The protection's machine, not this one, decides which side runs the guest now.
            protecting.fail(error);
            return self.driver.nudge();
        }
        let event = match error.fault() {
            Some(Fault::Local) => Fed::LocalFailure,
            Some(_) => Fed::PeerMisbehaved,
            None => Fed::ConnectionLost,
        };
        tracing::debug!(%error, "outgoing migration");
        if matches!(state, State::Suspending | State::Reconnecting) && event != Fed::LocalFailure {
            return;
        }
        if event == Fed::ConnectionLost && self.driver.inspect(Source::would_reconnect) {
            // This is no failure if another connection is made in time.
            self.reconnection.lost.lock().get_or_insert(error);
            return self.report(event);
        }
        self.note_error(error);
        self.report(event);
    }

    /// Records the reason of the failure, unless one is already recorded.
    pub(super) fn note_error(&self, error: MigrationError) {
        error.note(&self.ending.error, Some(&self.guest.ram));
    }

    /// Removes the recorded failure after it was handled, so that the next one is recorded.
    #[cfg(any(feature = "postcopy", feature = "reconnect"))]
    pub(super) fn forget_error(&self) {
        *self.ending.error.lock() = None;
    }

    /// Finds the failed pages, if a recorded memory error does not name them.
    pub(super) fn find_failed_pages(&self) {
        MigrationError::find_pages(&self.ending.error, &self.guest.ram);
    }

    pub(super) fn error(&self) -> Option<MigrationError> {
        self.ending.error.lock().clone()
    }

    /// Registers a channel, so that it can be shut down. After the end of the migration it is shut down
    /// immediately.
    pub(super) fn adopt(&self, channel: Channel) -> Arc<Channel> {
        let channel = Arc::new(channel);
        self.session.channels.lock().push(Arc::clone(&channel));
        if self.session.connecting.is_cancelled() {
            channel.shutdown();
        }
        channel
    }

    /// Registers a channel of a session that replaces a lost one.
    #[cfg(feature = "postcopy")]
    pub(super) fn adopt_again(&self, channel: Channel) -> Arc<Channel> {
        let channel = Arc::new(channel);
        self.session.channels.lock().push(Arc::clone(&channel));
        channel
    }

    /// Bytes that were written to channels and have not left this host.
    pub(super) fn unsent_bytes(&self) -> u64 {
        self.session.channels.lock().iter().map(|channel| channel.unsent_bytes()).sum()
    }

    /// Unblocks every thread of a lost session.
    pub(super) fn break_session(&self) {
        for channel in self.session.channels.lock().iter() {
            channel.shutdown();
        }
        if let Some(streams) = &*self.session.streams.lock() {
            streams.close();
        }
        self.session.lanes.queue.end();
        self.session.limiter.open();
    }

    /// Prepares for another session. No thread of the last one runs any more.
    #[cfg(feature = "reconnect")]
    pub(super) fn begin_session(&self) {
        self.session.lanes.restart();
        self.session.limiter.close();
        *self.measures.probes.lock() = Probes::default();
    }

    /// Unblocks every thread that waits for the peer, the network or a budget.
    pub(super) fn interrupt(&self) {
        self.session.connecting.cancel();
        self.break_session();
        self.postcopy.stop();
    }

    /// Releases the channels: their descriptors close when the last thread has released them.
    pub(super) fn drop_channels(&self) {
        self.session.channels.lock().clear();
    }

    pub(super) fn tell(&self, event: &Event) {
        threads::tell(self.observer.as_ref(), event);
        if matches!(event, Event::Status(_)) {
            // With the lock, so that a thread that has just read the old status is already waiting.
            let _outcome = self.ending.outcome.lock();
            self.ending.changed.notify_all();
        }
        self.bell.ring();
    }

    /// Reports passed states to the observer. Only the control thread calls it, so that the order is kept.
    pub(super) fn tell_passed(&self) {
        for state in self.driver.take_passed() {
            if state == State::Completed && self.handover.hands_over_memory {
                // This comes before the status is published. Otherwise another guest could arrive here, in memory
                // that the destination uses.
                same_host::let_go(self.guest.vm.as_ref(), &self.guest.ram);
                self.handover.custody.set(Custody::Gone);
            }
            if state == State::Committing {
                self.tell(&Event::Prepared);
                self.tell(&Event::Committed);
            }
            // The reason is recorded before the status, so that a thread that reads the status finds the reason.
            if let Some(cause) = self.driver.inspect(Source::failure) {
                self.note_cause(cause);
            }
            let status = match (status_of(state), self.driver.inspect(Source::is_postcopy)) {
                // The status changes when the package is sent.
                (Status::Device, true) if state >= State::Preparing => Status::PostcopyDevice,
                (status, _) => status,
            };
            if self.measures.statistics.lock().set_status(status, self.measures.counters.now()) {
                self.tell(&Event::Status(status));
            }
        }
    }

    pub(super) fn end(&self, outcome: Outcome) {
        *self.ending.outcome.lock() = Some(outcome);
        self.ending.changed.notify_all();
        self.bell.ring();
    }

    /// Clears the outcome of a held guest that is to be freed.
    ///
    /// Callers then wait for the end of the new attempt.
    ///
    /// Gives the old outcome; `None` if no guest is held, or if another thread frees it.
    pub(super) fn begin_again(&self) -> Option<Outcome> {
        self.ending.outcome.lock().take_if(|outcome| matches!(outcome, Outcome::Failed { held: true, .. }))
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.ending.outcome.lock().clone()
    }

    pub(super) fn wait(&self) -> Outcome {
        let mut outcome = self.ending.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            self.ending.changed.wait(&mut outcome);
        }
    }

    pub(super) fn wait_timeout(&self, limit: Duration) -> Waited {
        let deadline = Instant::now().checked_add(limit);
        let is_undecided = || self.measures.statistics.lock().status() == Status::Undecided;
        let was_undecided = is_undecided();
        let mut outcome = self.ending.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return Waited::Ended(outcome.clone());
            }
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            match is_undecided() {
                true if is_over || !was_undecided => return Waited::Undecided,
                false if is_over => return Waited::TimedOut,
                _ => {}
            }
            match deadline {
                Some(deadline) => drop(self.ending.changed.wait_until(&mut outcome, deadline)),
                // Longer than the clock can count.
                None => self.ending.changed.wait(&mut outcome),
            }
        }
    }
}

/// The custody in the machine's present state; `before` is the migration's initial custody.
fn custody_of(machine: &Source, stores: bool, before: Custody) -> Custody {
    match machine.state() {
        State::Completed if stores => Custody::Saved,
        State::Completed => Custody::Gone,
        State::Undecided => Custody::Undecided,
        State::Held => Custody::Held,
        State::Cancelled | State::Failed => before,
        _ => Custody::Leaving { is_free: machine.may_guest_run() },
    }
}
