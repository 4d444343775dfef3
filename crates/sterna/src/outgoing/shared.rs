//! What the threads of one outgoing migration share.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};
use sterna_proto::source::{Event as Fed, Refusal, Source, State};
use sterna_ram::{Custody, CustodyClaim, GuestRam, TrackingClaim};
use sterna_transport::{Address, CancelFlag, Channel};

use super::asking::Asking;
use super::guest_source::{GuestSource, PageReader};
use super::lanes::limiter::Limiter;
use super::lanes::state::Lanes;
use super::limits::status_of;
use super::measure::{Counters, LiveStatistics, Probes};
use super::outcome::Outcome;
use super::postcopy::Postcopy;
use super::postcopy::recovery::Recovery;
use super::protection::Protecting;
use super::rdma::counts::RdmaCounts;
use super::running_streams::RunningStreams;
use super::same_host;
use crate::driver::Driver;
use crate::error::{Fault, MigrationError};
use crate::events::{Event, Observer, Status};
use crate::hooks::Hook;
use crate::identity::Identity;
use crate::params::{Capabilities, MigrationMode, Parameters};
use crate::precopy::Recorded;
use crate::reconnect::Unconfirmed;
use crate::threads;
use crate::vm::SourceVm;

pub(super) struct Shared {
    pub guest_source: Arc<dyn GuestSource>,
    pub vm: Arc<dyn SourceVm>,
    /// The guest's RAM as it was when the migration began.
    pub ram: GuestRam,
    pub to: Address,
    pub capabilities: Capabilities,
    pub params: Mutex<Parameters>,
    pub observer: Arc<dyn Observer>,
    pub driver: Driver<Source>,
    pub counters: Arc<Counters>,
    pub limiter: Arc<Limiter>,
    pub lanes: Lanes,
    pub statistics: Mutex<LiveStatistics>,
    /// Names this migration, and proves it, to a destination that is asked what became of it.
    pub identity: Identity,
    /// An operator was told that somebody answered who is not the destination.
    pub told_of_forgery: AtomicBool,
    pub connecting: CancelFlag,
    /// What this migration says of who has the guest.
    pub custody: Arc<CustodyClaim>,
    /// Held as long as this migration may touch the dirty log.
    pub tracking: Arc<Mutex<Option<TrackingClaim>>>,
    /// Hooks that are released, in that order.
    pub released: Mutex<Vec<Arc<dyn Hook>>>,
    /// The question to a destination whose acknowledgement was lost.
    pub asking: Mutex<Option<Asking>>,
    /// Decides how precopy goes on, once pages move; and what it was told.
    pub policy: Mutex<Option<Recorded>>,
    /// Pings on their way.
    pub probes: Mutex<Probes>,
    /// Devices' streams, once they are begun.
    pub streams: Mutex<Option<Arc<dyn RunningStreams>>>,
    /// What a source over RDMA counts.
    pub rdma: Arc<RdmaCounts>,
    /// The destination waits for memory that comes as descriptors.
    pub memory_is_expected: AtomicBool,
    /// Pages that follow the guest.
    pub postcopy: Postcopy,
    /// Other connections in place of one that was lost then.
    pub recovery: Recovery,
    /// The destination is a standby: checkpoints follow.
    pub protecting: Option<Arc<Protecting>>,
    /// What was sent and may be lost, if this side comes back after a loss.
    pub unconfirmed: OnceLock<Unconfirmed>,
    /// The destination has said that it waits then.
    pub is_waited_for: AtomicBool,
    /// Why the connection was lost that is being made anew, and how the last attempt ended.
    pub lost: Mutex<Option<MigrationError>>,
    pub last_attempt: Mutex<Option<String>>,
    channels: Mutex<Vec<Arc<Channel>>>,
    error: Mutex<Option<MigrationError>>,
    outcome: Mutex<Option<Outcome>>,
    ended: Condvar,
}

impl Shared {
    pub(super) fn new(
        guest_source: Arc<dyn GuestSource>,
        to: Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        (source, identity, custody, tracking): (Source, Identity, CustodyClaim, TrackingClaim),
    ) -> Self {
        let (vm, ram) = (Arc::clone(guest_source.vm()), guest_source.ram().clone());
        let (custody, tracking) = (Arc::new(custody), Arc::new(Mutex::new(Some(tracking))));
        let watch = {
            let (custody, tracking) = (Arc::clone(&custody), Arc::clone(&tracking));
            let is_file = matches!(to, Address::File { .. });
            let handed = (params.mode == MigrationMode::CprTransfer).then(|| (Arc::clone(&vm), ram.clone()));
            let told = Cell::new(None);
            move |machine: &Source| {
                if matches!(machine.state(), State::Cancelled | State::Failed) {
                    // All is undone: whoever hears of it may begin another migration at once.
                    *tracking.lock() = None;
                }
                // An event that changes nothing must not take back what others have said since.
                let now = custody_of(machine, is_file, custody.before());
                if told.replace(Some(now)) != Some(now) {
                    // Before anybody learns that another guest may come here: it would come into memory that the destination
                    // has.
                    if let (Some((vm, ram)), Custody::Gone) = (&handed, now) {
                        same_host::let_go(vm.as_ref(), ram);
                    }
                    custody.set(now);
                }
            }
        };
        let lanes = if capabilities.multifd { usize::from(params.multifd_channels) } else { 1 };
        let rdma = Arc::<RdmaCounts>::default();
        let statistics = LiveStatistics::new(ram.total_bytes(), lanes as u32, Arc::clone(&rdma));
        Self {
            statistics: Mutex::new(statistics),
            limiter: Arc::new(Limiter::new(params.max_bandwidth_bytes)),
            postcopy: Postcopy::new(params.max_postcopy_bandwidth_bytes),
            recovery: Recovery::new(to.clone()),
            params: Mutex::new(params),
            driver: Driver::new(source, watch),
            counters: Arc::default(),
            lanes: Lanes::new(lanes),
            identity,
            told_of_forgery: AtomicBool::new(false),
            connecting: CancelFlag::new(),
            custody,
            tracking,
            released: Mutex::default(),
            asking: Mutex::default(),
            policy: Mutex::default(),
            probes: Mutex::default(),
            streams: Mutex::default(),
            rdma,
            memory_is_expected: AtomicBool::new(false),
            protecting: None,
            unconfirmed: OnceLock::new(),
            is_waited_for: AtomicBool::new(false),
            lost: Mutex::default(),
            last_attempt: Mutex::default(),
            channels: Mutex::default(),
            error: Mutex::default(),
            outcome: Mutex::default(),
            ended: Condvar::new(),
            guest_source,
            vm,
            ram,
            to,
            capabilities,
            observer,
        }
    }

    /// A reader of pages, for one lane.
    pub(super) fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        match &self.protecting {
            Some(protecting) => Ok(protecting.staging.clone()),
            None => self.guest_source.reader(),
        }
    }

    pub(super) fn params(&self) -> Parameters {
        self.params.lock().clone()
    }

    /// Tells the machine what happened. Once it undoes, no thread may go on waiting for the peer.
    pub(super) fn feed(&self, event: Fed) -> Result<(), Refusal> {
        let state = self.driver.feed(event)?;
        match state {
            State::Cancelling | State::Failing => self.interrupt(),
            // Whoever feeds that it is lost is a thread of the session, which ends before another begins.
            State::Suspending if event == Fed::ConnectionLost => self.break_session(),
            _ => {}
        }
        Ok(())
    }

    /// As [`Shared::feed`], for events that a machine never refuses from a sound engine.
    pub(super) fn report(&self, event: Fed) {
        if let Err(refusal) = self.feed(event) {
            tracing::error!(%refusal, "the handover machine refused an event");
            self.note_error(MigrationError::Internal(refusal.to_string()));
        }
    }

    /// Something failed. The first reason is the one that is reported.
    ///
    /// While the migration is being undone, or is over, a closed channel is no news.
    pub(super) fn fail(&self, error: MigrationError) {
        let state = self.driver.inspect(Source::state);
        if state.is_final() || matches!(state, State::Cancelling | State::Failing | State::Held) {
            return;
        }
        if let (Some(protecting), State::Protected) = (&self.protecting, state) {
            // Who runs the guest now is not this machine's to decide.
            protecting.inbox.fail(error);
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
            // No reason to fail, if another connection comes in time.
            self.lost.lock().get_or_insert(error);
            return self.report(event);
        }
        self.note_error(error);
        self.report(event);
    }

    /// Keeps why it fails, unless something is known already.
    pub(super) fn note_error(&self, error: MigrationError) {
        error.note(&self.error, Some(&self.ram));
    }

    /// What has failed is over: the next reason counts.
    pub(super) fn forget_error(&self) {
        *self.error.lock() = None;
    }

    /// Finds out which pages have failed, if it failed because of some that nobody named.
    pub(super) fn find_failed_pages(&self) {
        MigrationError::find_pages(&self.error, &self.ram);
    }

    pub(super) fn error(&self) -> Option<MigrationError> {
        self.error.lock().clone()
    }

    /// Registers a channel, so that it can be shut down. One that comes too late is shut down at once.
    pub(super) fn adopt(&self, channel: Channel) -> Arc<Channel> {
        let channel = Arc::new(channel);
        self.channels.lock().push(Arc::clone(&channel));
        if self.connecting.is_cancelled() {
            channel.shutdown();
        }
        channel
    }

    /// As [`Shared::adopt`], for channels that take the place of those that were lost.
    pub(super) fn adopt_again(&self, channel: Channel) -> Arc<Channel> {
        let channel = Arc::new(channel);
        self.channels.lock().push(Arc::clone(&channel));
        channel
    }

    /// Bytes that were written and are still on this host.
    pub(super) fn unsent_bytes(&self) -> u64 {
        self.channels.lock().iter().map(|channel| channel.unsent_bytes()).sum()
    }

    /// Unblocks every thread that works for a session that was lost.
    pub(super) fn break_session(&self) {
        for channel in self.channels.lock().iter() {
            channel.shutdown();
        }
        if let Some(streams) = &*self.streams.lock() {
            streams.close();
        }
        self.lanes.queue.end();
        self.limiter.open();
    }

    /// Another session begins; no thread works for the last one.
    pub(super) fn begin_session(&self) {
        self.lanes.restart();
        self.limiter.close();
        *self.probes.lock() = Probes::default();
    }

    /// Unblocks every thread that waits for the peer, the network or a budget.
    pub(super) fn interrupt(&self) {
        self.connecting.cancel();
        self.break_session();
        self.postcopy.stop();
    }

    /// Lets go of the channels: their descriptors close when the last thread is done with them.
    pub(super) fn drop_channels(&self) {
        self.channels.lock().clear();
    }

    pub(super) fn tell(&self, event: &Event) {
        threads::tell(self.observer.as_ref(), event);
    }

    /// Tells the observer which states were passed. Control thread only, so that the order holds.
    pub(super) fn tell_passed(&self) {
        for state in self.driver.take_passed() {
            if state == State::Committing {
                self.tell(&Event::Prepared);
                self.tell(&Event::Committed);
            }
            // Whoever sees that it failed finds out why.
            if let Some(cause) = self.driver.inspect(Source::failure) {
                self.note_cause(cause);
            }
            let status = match (status_of(state), self.driver.inspect(Source::is_postcopy)) {
                // From the package on.
                (Status::Device, true) if state >= State::Preparing => Status::PostcopyDevice,
                (status, _) => status,
            };
            if self.statistics.lock().set_status(status, self.counters.now()) {
                self.tell(&Event::Status(status));
            }
        }
    }

    pub(super) fn end(&self, outcome: Outcome) {
        *self.outcome.lock() = Some(outcome);
        self.ended.notify_all();
    }

    /// A held guest is to be freed: who waits from now on waits for the end of that. Gives how it ended before; `None`
    /// if no guest is held, or somebody else frees it.
    pub(super) fn begin_again(&self) -> Option<Outcome> {
        self.outcome.lock().take_if(|outcome| matches!(outcome, Outcome::Failed { held: true, .. }))
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().clone()
    }

    pub(super) fn wait(&self) -> Outcome {
        let mut outcome = self.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            self.ended.wait(&mut outcome);
        }
    }
}

/// Who has the guest when the machine stands so; `before` had it when the migration began.
fn custody_of(machine: &Source, is_file: bool, before: Custody) -> Custody {
    match machine.state() {
        State::Completed if is_file => Custody::Saved,
        State::Completed => Custody::Gone,
        State::Undecided => Custody::Undecided,
        State::Held => Custody::Held,
        State::Cancelled | State::Failed => before,
        _ => Custody::Leaving { is_free: machine.may_guest_run() },
    }
}
