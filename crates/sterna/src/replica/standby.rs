//! The handle of a standby.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna_ram::PAGE_SIZE;
use sterna_transport::Address;

use super::contact::StandbyContact;
use super::disk::Disks;
use super::held::{HeldCheckpoint, held};
use super::protected::{ContactRules, Contacts, LastHandle};
use super::store::{Stage, Store};
use super::survivor::Survivor;
use super::takeover::{self, TakenOver, TakeoverError, TakeoverPermission};
use super::target::StandbyTarget;
use crate::error::MigrationError;
use crate::events::{Observer, Status};
use crate::incoming::follower::Follower as _;
use crate::incoming::{Arrival, Incoming, Refusal};
use crate::opaque::ImagePlan;
use crate::params::{Capabilities, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;

/// How a standby works. Later versions add fields: write it with `..StandbyOptions::default()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyOptions {
    /// Most bytes that a checkpoint may bring in pages, and their notes. The journal takes memory only as pages come.
    pub journal_limit_bytes: u64,
    /// Whether a primary that shows no certificate is taken over TCP, on loopback alone. Over a Unix socket its file's
    /// permissions decide.
    pub insecure: bool,
    /// Most bytes that the guest may write to its disks between two checkpoints, and their notes, over all disks.
    pub disk_limit_bytes: u64,
}

impl Default for StandbyOptions {
    fn default() -> Self {
        Self { journal_limit_bytes: 1 << 30, insecure: false, disk_limit_bytes: 1 << 30 }
    }
}

/// A standby. Cloning gives another handle; when the last one is dropped, what is held is gone.
#[derive(Clone)]
pub struct Standby {
    incoming: Incoming,
    target: Arc<StandbyTarget>,
    store: Arc<Store>,
    contacts: Arc<Contacts>,
    /// One takeover at a time.
    taking_over: Arc<Mutex<()>>,
    _last: Arc<LastHandle>,
}

/// Where a standby stands.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum StandbyState {
    /// It waits for a primary.
    Waiting,
    /// A guest is being seeded: nothing is held yet.
    Seeding,
    /// The last checkpoint is held, and more come.
    Following,
    /// The last checkpoint is held, and no more come.
    Lost(MigrationError),
    /// The seeding failed: nothing is held, and the guest is where it was.
    Failed(MigrationError),
    /// The last checkpoint was taken over.
    TakenOver,
    /// The guest never runs here, by the protection's outcome ([`Standby::contact`] says which): nothing is held any more.
    Discarded,
}

/// What a standby counts. Later versions add fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StandbyStatistics {
    /// Bytes of the guest's RAM; 0 until it is known.
    pub ram_bytes: u64,
    /// All that came, the seeding included.
    pub received_bytes: u64,
    /// Pages with content, the seeding's included.
    pub normal_pages: u64,
    /// Zero pages, the seeding's included.
    pub zero_pages: u64,
    /// Checkpoints that were held since the seeding.
    pub checkpoints: u64,
    /// Pages of the last one with content.
    pub last_normal_pages: u64,
    /// Zero pages of the last one.
    pub last_zero_pages: u64,
    /// Bytes of the last one's devices.
    pub last_device_bytes: u64,
    /// From REPLY of the last one until it was held. In most of this time the primary's guest stood.
    pub last_took: Duration,
    /// The most that the journal took, in bytes.
    pub most_journal_bytes: u64,
    /// The most that was buffered of what the guest wrote to its disks, in bytes.
    pub most_disk_bytes: u64,
    /// Since the last one was held; before the first, since the seeding was.
    pub age: Option<Duration>,
}

impl Standby {
    /// Waits at `at` for a primary. The address is bound when this returns.
    ///
    /// The primary has the multifd channels and the compression that `params` and `capabilities` say (nothing of that is
    /// negotiated: specs/stream.md §10), and the capabilities `x-colo` and `return-path`.
    ///
    /// # Errors
    /// [`StartError`] when the address cannot be bound, or the settings make no sense or let anybody in.
    pub fn listen(
        at: &Address,
        options: &StandbyOptions,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        Self::begin(at, options, params, capabilities, observer, Contacts::none())
    }

    /// As [`listen`](Self::listen), for a guest that goes on as `survivor`, and that `rules` allow to be protected in contact with its
    /// primary. The contact's connection comes to the same address, before those of the guest (`specs/replica.md §3`). Without
    /// rules a primary that wants to be in contact is refused.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
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
        // No guest is held here that would run.
        let capabilities = Capabilities { unmanaged: true, ..capabilities };
        let disks = Disks::new(contacts.survivor.disks(), options.disk_limit_bytes);
        let store = Arc::new(Store::new(disks));
        let weak = Arc::downgrade(&store);
        store.disks.on_lost(move |why| {
            // Before that the first checkpoint finds it.
            if let Some(store) = weak.upgrade().filter(|store| store.has_begun()) {
                store.lost(why);
            }
        });
        let contacts = Arc::new(contacts);
        let _ = store.witness.set(contacts.clone());
        let target = StandbyTarget::new(Arc::clone(&store), options.journal_limit_bytes, contacts.clone());
        let target = Arc::new(target);
        let incoming = Incoming::listen_for(target.clone(), at, params, capabilities, observer)?;
        contacts.listens(incoming.downgrade());
        let last = Arc::new(LastHandle(contacts.clone()));
        Ok(Self { incoming, target, store, contacts, taking_over: Arc::default(), _last: last })
    }

    /// Where it listens, with the port that the kernel chose.
    pub fn address(&self) -> Address {
        self.incoming.address()
    }

    /// Where it stands.
    pub fn state(&self) -> StandbyState {
        let arrival = self.incoming.arrival();
        match &self.store.state().stage {
            // Nothing was ever held: why the guest did not come says more.
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

    /// What it counts, now.
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
        }
    }

    /// The checkpoint that would be taken over; none before the seeding is held.
    pub fn held(&self) -> Option<HeldCheckpoint> {
        held(&self.store)
    }

    /// Makes an image of the last held checkpoint and puts it in the place that `plan` names. From the question to
    /// `permission` on no further checkpoint becomes held, so what leaves the primary is never ahead of the image. If the
    /// permission is given, the primary's connections are closed first; if it is refused, the standby follows on.
    ///
    /// An image that could not be written may be tried again, elsewhere.
    ///
    /// # Errors
    /// [`TakeoverError`]. What is held stays held.
    pub fn takeover(
        &self,
        plan: &ImagePlan,
        permission: &dyn TakeoverPermission,
    ) -> Result<TakenOver, TakeoverError> {
        let _one = self.taking_over.lock();
        self.contacts.check_alone()?;
        takeover::into_image(&self.store, &self.incoming, plan, permission)
    }

    /// As [`takeover`](Self::takeover), for a guest that goes on as `survivor`.
    ///
    /// # Errors
    /// [`TakeoverError`]. What is held stays held.
    pub fn takeover_by(
        &self,
        survivor: &dyn Survivor,
        permission: &dyn TakeoverPermission,
    ) -> Result<HeldCheckpoint, TakeoverError> {
        let _one = self.taking_over.lock();
        self.contacts.check_alone()?;
        takeover::into_survivor(&self.store, &self.incoming, survivor, permission)
    }

    /// The contact with the primary, if there is or was one: it decides who runs the guest, and takes the operator's word.
    pub fn contact(&self) -> Option<StandbyContact> {
        self.contacts.current()
    }

    /// Gives the seeding up; the primary's guest runs on.
    ///
    /// # Errors
    /// [`Refusal`] once the seeding is held: drop the standby if nobody needs what it holds.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.incoming.cancel()
    }
}

/// What does not go with a standby.
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
    if capabilities.mapped_ram {
        return Err(SettingsError::MappedNeedsFile);
    }
    match at {
        Address::Rdma { .. } | Address::File { .. } => Err(SettingsError::NoStandbyThere),
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
