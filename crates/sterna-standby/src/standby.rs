//! The handle of a standby.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna::SettingsError;
use sterna::StartError;
use sterna::error::MigrationError;
use sterna::events::{Observer, Status};
use sterna::incoming::{Arrival, Incoming, Refusal};
use sterna::internals::Follower as _;
use sterna::internals::threads::{OnThreadStart, hooked};
use sterna::params::{Capabilities, Parameters};
use sterna::rules::{self, Feature, Features, Side};
use sterna_opaque::ImagePlan;
use sterna_ram::PAGE_SIZE;
use sterna_transport::Address;

use super::contact::StandbyContact;
use super::disk::Disks;
use super::hang::checkpoints_hang;
use super::held::{HeldCheckpoint, held};
use super::protected::{ContactRules, Contacts, LastHandle};
use super::store::{Stage, Store};
use super::survivor::Survivor;
use super::takeover::{self, TakenOver, TakeoverError, TakeoverPermission};
use super::target::StandbyTarget;

/// Options of a standby. Later versions add fields: write it with `..StandbyOptions::default()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyOptions {
    /// Most bytes of a checkpoint's pages and their notes (default 1 GiB). The journal allocates memory only as pages
    /// arrive.
    pub journal_limit_bytes: u64,
    /// Whether a primary without a certificate is accepted over TCP; only on loopback. Over a Unix socket, the
    /// permissions of the socket's file decide.
    pub insecure: bool,
    /// Most bytes of disk writes between two checkpoints, over all disks and including notes (default 1 GiB).
    pub disk_limit_bytes: u64,
}

impl Default for StandbyOptions {
    fn default() -> Self {
        Self { journal_limit_bytes: 1 << 30, insecure: false, disk_limit_bytes: 1 << 30 }
    }
}

/// A standby. Cloning gives another handle. Dropping the last handle drops the held checkpoint.
#[derive(Clone)]
pub struct Standby {
    incoming: Incoming,
    target: Arc<StandbyTarget>,
    store: Arc<Store>,
    contacts: Arc<Contacts>,
    /// The VMM's hook for threads of a takeover.
    hook: Option<OnThreadStart>,
    /// Locked during a takeover, so that there is one at a time.
    taking_over: Arc<Mutex<()>>,
    _last: Arc<LastHandle>,
}

/// Progress of a standby.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum StandbyState {
    /// The standby waits for a primary.
    Waiting,
    /// A guest is being seeded: no checkpoint is held yet.
    Seeding,
    /// The last checkpoint is held, and more are received.
    Following,
    /// The last checkpoint is held, and no more are received.
    Lost(MigrationError),
    /// The seeding failed: no checkpoint is held, and the guest is still at the primary.
    Failed(MigrationError),
    /// The guest was taken over from the last checkpoint.
    TakenOver,
    /// The guest never runs here, because of the protection's outcome ([`Standby::contact`] returns it). No
    /// checkpoint is held any more.
    Discarded,
}

/// Counters of a standby. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StandbyStatistics {
    /// Bytes of the guest's RAM; 0 until it is known.
    pub ram_bytes: u64,
    /// Bytes received, including the seeding.
    pub received_bytes: u64,
    /// Pages with content, including the seeding.
    pub normal_pages: u64,
    /// Zero pages, including the seeding.
    pub zero_pages: u64,
    /// Checkpoints that were held since the seeding.
    pub checkpoints: u64,
    /// Pages with content in the last checkpoint.
    pub last_normal_pages: u64,
    /// Zero pages in the last checkpoint.
    pub last_zero_pages: u64,
    /// Bytes of devices in the last checkpoint.
    pub last_device_bytes: u64,
    /// Time from the last checkpoint's REPLY until it was held. The primary's guest was paused for most of this time.
    pub last_took: Duration,
    /// The most bytes that the journal has used.
    pub most_journal_bytes: u64,
    /// The most bytes of disk writes that were buffered.
    pub most_disk_bytes: u64,
    /// Time since the last checkpoint became held; before the first, since the seeding became held.
    pub age: Option<Duration>,
    /// Typical time from one held checkpoint to the next.
    pub interval: Option<Duration>,
}

impl StandbyStatistics {
    /// Whether no checkpoint has become held for several intervals. If the primary is in contact, this is a problem.
    #[must_use]
    pub fn checkpoints_hang(&self) -> bool {
        let (Some(age), Some(interval)) = (self.age, self.interval) else { return false };
        checkpoints_hang(age, interval)
    }
}

impl Standby {
    /// Waits at `at` for a primary. The address is bound when this returns.
    ///
    /// The primary must use the multifd channels and the compression that `params` and `capabilities` specify,
    /// because they are not negotiated (specs/stream.md §10). It must have the capabilities `x-colo` and
    /// `return-path`.
    ///
    /// # Errors
    /// [`StartError`] if the address cannot be bound, the settings contradict each other, or they would accept any
    /// peer.
    pub fn listen(
        at: &Address,
        options: &StandbyOptions,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        Self::begin(at, options, params, capabilities, observer, Contacts::none())
    }

    /// Like [`listen`](Self::listen), for a guest that continues as `survivor` after a takeover.
    ///
    /// `rules` allow a primary to be in contact. The contact uses a connection to the same address, which must be
    /// opened before the guest's connections (`specs/replica.md §3`). Without rules, a primary that requests contact
    /// is refused.
    ///
    /// # Errors
    /// Like [`listen`](Self::listen).
    pub fn protect(
        at: &Address,
        options: &StandbyOptions,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        survivor: Arc<dyn Survivor>,
        rules: Option<ContactRules>,
    ) -> Result<Self, StartError> {
        Self::begin(at, options, params, capabilities, observer, Contacts::new(survivor, rules))
    }

    fn begin(
        at: &Address,
        options: &StandbyOptions,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        contacts: Contacts,
    ) -> Result<Self, StartError> {
        check(at, options, &params, &capabilities, contacts.demand_a_secret())?;
        // Managed mode would wait for a release of the guest, and a standby never runs one.
        let capabilities = Capabilities { unmanaged: true, ..capabilities };
        let disks = Disks::new(contacts.survivor.disks(), options.disk_limit_bytes);
        let store = Arc::new(Store::new(disks));
        let weak = Arc::downgrade(&store);
        store.disks.on_lost(move |why| {
            // An earlier loss is found when the first checkpoint is checked.
            if let Some(store) = weak.upgrade().filter(|store| store.has_begun()) {
                store.lost(why);
            }
        });
        let contacts = Arc::new(contacts);
        let _ = store.witness.set(contacts.clone());
        let target = StandbyTarget::new(Arc::clone(&store), options.journal_limit_bytes, contacts.clone());
        let target = Arc::new(target);
        let hook = params.on_thread_start.clone();
        let incoming = Incoming::listen_for(target.clone(), at, params, capabilities, observer)?;
        contacts.listens(incoming.downgrade());
        let last = Arc::new(LastHandle(contacts.clone()));
        Ok(Self { incoming, target, store, contacts, hook, taking_over: Arc::default(), _last: last })
    }

    /// The bound address, with the port that the kernel chose.
    pub fn address(&self) -> Address {
        self.incoming.address()
    }

    /// The current progress.
    pub fn state(&self) -> StandbyState {
        let arrival = self.incoming.arrival();
        match &self.store.state().stage {
            // No checkpoint was ever held, so the reason why the guest did not arrive is more useful.
            Stage::Discarded if matches!(arrival, Some(Arrival::Failed(_))) => {}
            Stage::Following => return StandbyState::Following,
            Stage::Lost(why) => return StandbyState::Lost(why.clone()),
            Stage::TakenOver => return StandbyState::TakenOver,
            Stage::Discarded => return StandbyState::Discarded,
            Stage::Seeding => {}
        }
        match (arrival, self.incoming.status()) {
            (Some(Arrival::Failed(why)), _) => StandbyState::Failed(why),
            (_, Status::Setup) => StandbyState::Waiting,
            _ => StandbyState::Seeding,
        }
    }

    /// The current counters.
    pub fn statistics(&self) -> StandbyStatistics {
        let came = self.incoming.statistics();
        let ram_bytes = self.target.ram_bytes();
        let state = self.store.state();
        let counts = &state.counts;
        StandbyStatistics {
            ram_bytes,
            received_bytes: came.received_bytes,
            normal_pages: came.normal_pages,
            zero_pages: came.zero_pages,
            checkpoints: state.number,
            last_normal_pages: counts.last.normal_pages,
            last_zero_pages: counts.last.zero_pages,
            last_device_bytes: counts.device_bytes,
            last_took: counts.took,
            most_journal_bytes: counts.most_journal_bytes,
            most_disk_bytes: self.store.disks.most_bytes(),
            age: counts.held_at.map(|held| held.elapsed()),
            interval: counts.interval,
        }
    }

    /// The checkpoint from which a takeover would start the guest; `None` before the seeding is held.
    pub fn held(&self) -> Option<HeldCheckpoint> {
        held(&self.store)
    }

    /// Writes an image of the last held checkpoint to the place that `plan` names.
    ///
    /// From the request to `permission` on, no further checkpoint becomes held, so the primary's output is never
    /// ahead of the image. If the permission is given, the primary's connections are closed first. If it is refused,
    /// the standby continues to receive checkpoints. If writing the image fails, call this again, with another place
    /// if necessary.
    ///
    /// # Errors
    /// [`TakeoverError`]. The held checkpoint stays held.
    pub fn takeover(
        &self,
        plan: &ImagePlan,
        permission: &dyn TakeoverPermission,
    ) -> Result<TakenOver, TakeoverError> {
        let _one = self.taking_over.lock();
        self.contacts.check_alone()?;
        hooked(self.hook.as_ref(), || takeover::into_image(&self.store, &self.incoming, plan, permission))
    }

    /// Like [`takeover`](Self::takeover), for a guest that continues as `survivor`.
    ///
    /// # Errors
    /// [`TakeoverError`]. The held checkpoint stays held.
    pub fn takeover_by(
        &self,
        survivor: &dyn Survivor,
        permission: &dyn TakeoverPermission,
    ) -> Result<HeldCheckpoint, TakeoverError> {
        let _one = self.taking_over.lock();
        self.contacts.check_alone()?;
        hooked(self.hook.as_ref(), || {
            takeover::into_survivor(&self.store, &self.incoming, survivor, permission)
        })
    }

    /// The contact with the primary, if there is or was one. It decides which side runs the guest, and accepts the
    /// operator's decisions.
    pub fn contact(&self) -> Option<StandbyContact> {
        self.contacts.current()
    }

    /// Cancels the seeding; the primary's guest continues to run.
    ///
    /// # Errors
    /// [`Refusal`] after the seeding is held. Drop the standby if the held checkpoint is not needed.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.incoming.cancel()
    }
}

/// Checks the settings that a standby excludes.
fn check(
    at: &Address,
    options: &StandbyOptions,
    params: &Parameters,
    capabilities: &Capabilities,
    demands_secret: bool,
) -> Result<(), SettingsError> {
    if options.journal_limit_bytes < PAGE_SIZE as u64 {
        return Err(SettingsError::NoJournal);
    }
    let features = Features::of_address(at)
        .with(Feature::MappedRam, capabilities.mapped_ram)
        .with(Feature::Protection, true);
    rules::check(features, Side::Destination)?;
    match at {
        Address::Tcp { host, .. } => {
            let is_open = params.tls.is_none() && !demands_secret && !(options.insecure && is_loopback(host));
            if is_open { Err(SettingsError::OpenStandby) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}
