//! Joins the contact at the standby's address with the held checkpoint (`specs/replica.md §3`).

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use sterna::error::{BadConnection, Fault, MigrationError, Misbehaviour, ProtectionDifference, VmError};
use sterna::events::Status;
use sterna::internals::Follower;
use sterna::internals::WeakIncoming;
use sterna_proto::replica::standby::{Event, State};
use sterna_transport::Channel;

use super::contact::{Claims, ContactError, Protection, Secret, StandbyContact, StandbyGuest};
use super::held::HeldGuest;
use super::store::{Stage, Store};
use super::survivor::Survivor;
use super::takeover::TakeoverError;
use super::witness::Witness;

type ClaimsOf = dyn Fn(Protection) -> Arc<dyn Claims> + Send + Sync;
type FenceOf = dyn Fn(Protection) -> Result<(), String> + Send + Sync;

/// Which primaries may be in contact, and the means to decide when contact is lost.
#[derive(Clone)]
pub struct ContactRules {
    /// The secret that the primary must know; 32 zero bytes mean no secret.
    pub secret: Secret,
    /// Whether a guest that arrives without a contact is refused.
    pub is_required: bool,
    /// Creates, for a protection, this side's access to the arbiter's claim.
    pub claims: Arc<ClaimsOf>,
    /// Fences the primary: makes sure that its guest of that protection does not run.
    pub fence: Arc<FenceOf>,
    /// Whether `fence` must succeed before the guest is started, even if the primary stops its guest by itself. A
    /// primary whose host hangs does not stop it.
    pub always_fences: bool,
}

/// The contacts of one standby.
pub(super) struct Contacts {
    pub(super) survivor: Arc<dyn Survivor>,
    rules: Option<ContactRules>,
    incoming: Mutex<Option<WeakIncoming>>,
    /// Lock order: do not lock this before the store's lock.
    current: Mutex<Option<Current>>,
    /// Locked while a primary greets. Its guest may arrive as soon as the primary has read the last message of the
    /// greeting.
    greeting: Mutex<()>,
    /// Number of greetings so far.
    count: AtomicU64,
}

struct Current {
    contact: StandbyContact,
    /// Number of the greeting that began this contact.
    number: u64,
    /// Host of the primary.
    host: Option<IpAddr>,
}

/// Abandons the contact when the last handle of the standby is dropped. The held checkpoint is then dropped, too.
pub(super) struct LastHandle(pub(super) Arc<Contacts>);

impl Drop for LastHandle {
    fn drop(&mut self) {
        if let Some(current) = self.0.current.lock().take() {
            current.contact.abandon();
        }
    }
}

/// Survivor of a standby without one: the caller of the takeover names the survivor.
struct Nowhere;

impl Survivor for Nowhere {
    fn prepare(&self, _: &HeldGuest) -> Result<(), VmError> {
        Err(VmError::new("the takeover", "the place where the guest runs after a takeover is not set"))
    }
    fn start(&self) -> Result<(), VmError> {
        self.never()
    }
    fn discard(&self) {}
}

impl Nowhere {
    fn never(&self) -> Result<(), VmError> {
        Err(VmError::new("the takeover", "nothing was made ready"))
    }
}

impl Contacts {
    pub(super) fn new(survivor: Arc<dyn Survivor>, rules: Option<ContactRules>) -> Self {
        Self {
            survivor,
            rules,
            incoming: Mutex::default(),
            current: Mutex::default(),
            greeting: Mutex::default(),
            count: AtomicU64::new(0),
        }
    }

    /// Contacts of a standby that accepts no contact.
    pub(super) fn none() -> Self {
        Self::new(Arc::new(Nowhere), None)
    }

    /// Whether every primary must be in contact and know a secret.
    pub(super) fn demand_a_secret(&self) -> bool {
        self.rules.as_ref().is_some_and(|rules| rules.is_required && !rules.secret.is_none())
    }

    /// Sets the reception to which the contacts belong.
    pub(super) fn listens(&self, incoming: WeakIncoming) {
        *self.incoming.lock() = Some(incoming);
    }

    pub(super) fn current(&self) -> Option<StandbyContact> {
        self.current.lock().as_ref().map(|current| current.contact.clone())
    }

    /// Answers a primary that greets over `channel`.
    pub(super) fn begin(
        self: &Arc<Self>,
        channel: &Arc<Channel>,
        store: &Arc<Store>,
    ) -> Result<(), MigrationError> {
        let peer = channel.peer().to_owned();
        let Some(rules) = &self.rules else {
            return Err(ProtectionDifference::NoContactHere { peer }.into());
        };
        let is_late = || self.has_stream() || !matches!(store.state().stage, Stage::Seeding);
        let _greeting = self.greeting.lock();
        if is_late() {
            return Err(ProtectionDifference::LateContact { peer }.into());
        }
        let number = self.count.fetch_add(1, Ordering::AcqRel);
        let guest = Arc::new(Guest {
            store: Arc::clone(store),
            contacts: Arc::clone(self),
            fence: Arc::clone(&rules.fence),
            number,
            protection: OnceLock::new(),
        });
        let claims = |protection| {
            let _ = guest.protection.set(protection);
            (rules.claims)(protection)
        };
        // `current` is not locked here, so that readers do not wait for a slow peer or arbiter.
        let begun =
            StandbyContact::begin_fencing(channel, &rules.secret, guest.clone(), rules.always_fences, claims);
        let contact = begun.map_err(|error| {
            let peer = peer.clone();
            match error {
                ContactError::TwoArbiters { .. } => {
                    ProtectionDifference::Arbiters { peer, why: Arc::new(error) }.into()
                }
                ContactError::Arbiter(_) => MigrationError::from(VmError::new(peer, error)),
                _ => {
                    let why = BadConnection::Contact(Arc::new(error));
                    Misbehaviour::Connection { peer, why }.into()
                }
            }
        })?;
        let mut current = self.current.lock();
        // Checked again: the guest of another primary may have started to arrive meanwhile.
        if is_late() {
            contact.abandon();
            return Err(ProtectionDifference::LateContact { peer }.into());
        }
        // A primary that has not sent its guest may have failed silently. So the newest contact replaces it.
        let before = current.replace(Current { contact, number, host: channel.peer_host() });
        drop(current);
        if let Some(before) = before {
            tracing::warn!("a primary that had not sent its guest is displaced by another one");
            before.contact.abandon();
        }
        Ok(())
    }

    /// Whether a guest is arriving, has arrived, or can no longer arrive.
    fn has_stream(&self) -> bool {
        let incoming = self.incoming.lock().as_ref().and_then(WeakIncoming::upgrade);
        incoming.is_some_and(|incoming| incoming.status() != Status::Setup)
    }

    /// Checks whether a guest may arrive now: if a contact is required, there must be one.
    pub(super) fn check_contact(&self) -> Result<(), MigrationError> {
        let is_required = self.rules.as_ref().is_some_and(|rules| rules.is_required);
        drop(self.greeting.lock());
        let is_there = self.current().is_some_and(|contact| !contact.state().state.is_final());
        if is_required && !is_there {
            return Err(ProtectionDifference::NoContact.into());
        }
        Ok(())
    }

    /// Checks whether a guest may arrive over `channel` now.
    pub(super) fn check_stream(&self, channel: &Channel) -> Result<(), MigrationError> {
        self.check_contact()?;
        // Without TLS, only the address relates the two connections to each other.
        let host = self.current.lock().as_ref().and_then(|current| current.host);
        match (host, channel.peer_host()) {
            (Some(contact), Some(guest)) if contact != guest && !channel.is_tls() => {
                let peer = channel.peer().to_owned();
                Err(ProtectionDifference::OtherHost { peer, guest, contact }.into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that no primary is or was in contact, because its machine decides about the guest.
    pub(super) fn check_alone(&self) -> Result<(), TakeoverError> {
        if self.current.lock().is_some() { Err(TakeoverError::Protected) } else { Ok(()) }
    }

    /// Informs the contact that the guest did not arrive completely.
    pub(super) fn seeding_failed(&self) {
        if let Some(contact) = self.current() {
            contact.failed("the guest has not come whole", Event::ConnectionLost);
        }
    }
}

impl Witness for Contacts {
    fn may_hold(&self, number: u64) -> bool {
        self.current.lock().as_ref().is_none_or(|current| current.contact.holds(number))
    }

    fn lost(&self, why: &MigrationError) {
        let Some(contact) = self.current().filter(|contact| contact.state().state <= State::Following) else {
            return;
        };
        let event = match why.fault() {
            Some(Fault::Local) => Event::LocalFailure,
            Some(_) => Event::PeerMisbehaved,
            None => Event::ConnectionLost,
        };
        contact.failed(why, event);
    }
}

/// Performs the contact's actions on the held checkpoint.
struct Guest {
    store: Arc<Store>,
    contacts: Arc<Contacts>,
    fence: Arc<FenceOf>,
    /// Number of the contact's greeting.
    number: u64,
    protection: OnceLock<Protection>,
}

impl Guest {
    fn incoming(&self) -> Option<sterna::incoming::Incoming> {
        self.contacts.incoming.lock().as_ref().and_then(WeakIncoming::upgrade)
    }
}

impl StandbyGuest for Guest {
    fn close_channels(&self) {
        let Some(incoming) = self.incoming() else { return };
        // If no guest has started to arrive, the standby continues to wait for one.
        if incoming.status() == Status::Setup {
            return;
        }
        // Refused after the seeding has completed: then checkpoints are being received.
        if incoming.cancel().is_err() {
            self.store.end();
        }
    }

    fn prepare(&self, checkpoint: u64) -> Result<(), VmError> {
        let what = format!("checkpoint {checkpoint}");
        let closed = || VmError::new(&what, "the standby was given up");
        // Never thawed: whether or not this succeeds, no further checkpoint is promised.
        self.store.freeze();
        self.store.end();
        self.incoming().ok_or_else(closed)?.wait();
        let guest = HeldGuest::of(&self.store).map_err(|error| VmError::new(&what, error))?;
        if guest.checkpoint().number != checkpoint {
            let other = format!("checkpoint {} is held in its place: report this", guest.checkpoint().number);
            return Err(VmError::new(&what, other));
        }
        self.contacts.survivor.prepare(&guest)
    }

    fn fence(&self) -> Result<(), VmError> {
        let protection = self.protection.get();
        let protection = protection.ok_or_else(|| VmError::new("the fence", "the contact has not begun"))?;
        (self.fence)(*protection).map_err(|why| VmError::new("the fence", why))
    }

    fn start(&self) -> Result<(), VmError> {
        self.contacts.survivor.start()?;
        self.store.state().stage = Stage::TakenOver;
        Ok(())
    }

    fn discard(&self) {
        let is_over = match self.incoming() {
            Some(incoming) => incoming.status() != Status::Setup,
            None => true,
        };
        if is_over {
            self.contacts.survivor.discard();
            return self.store.discard();
        }
        // No guest has started to arrive, so another primary may already be in contact.
        let mut current = self.contacts.current.lock();
        if current.as_ref().is_some_and(|current| current.number == self.number) {
            *current = None;
        }
    }
}
