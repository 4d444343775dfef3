//! One connection: what was agreed on with the back end, and which of its rings run. Lives on the device's thread;
//! every call may wait for the back end for ever.

mod pending;
mod speaking;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::dirty::VhostLog;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::configuration::{Configuration, RINGS_MAX};
use super::error::{StateDirection, VhostUserError};
use super::kind::DeviceKind;
use super::log_base::{self, LogBaseError};
use super::memory::GuestMemory;
use super::requests::Requests;
use super::ring::Ring;
use super::turn::Turn;
use super::used_rings::{Pages, UsedRings};
use super::worker::Asking;

const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// VIRTIO_F_RING_PACKED: a position in such a ring does not fit the library's SET_VRING_BASE.
const RING_PACKED: u64 = 1 << 34;

/// The eventfds of one queue. They outlive a stop and a start of the ring.
#[derive(Debug)]
pub(super) struct Events {
    /// The guest has made entries available.
    pub(super) kick: EventFd,
    /// The device has used entries.
    pub(super) call: EventFd,
}

/// A ring, and whether the back end serves it.
struct ActiveRing {
    ring: Ring,
    addresses: VringConfigData,
    used: Pages,
    serving: Serving,
    /// It has stopped, and it is not known yet that the back end has returned all that it took.
    may_owe: bool,
    /// The back end was seen to take a kick.
    takes_kicks: bool,
}

/// Whether the back end serves a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serving {
    No,
    /// A start or a stop failed half-way: it may, and how far it has got only it knows.
    Unknown,
    Yes,
}

/// What the back end has, as far as others than the session need to know.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Offer {
    /// Features that a driver may take.
    pub(super) features: u64,
    /// Those of them that are the back end's, and not only the front end's.
    pub(super) of_back_end: u64,
    /// Besides its rings it has a state that moves.
    pub(super) has_state: bool,
}

/// What a session is made of.
pub(super) struct Terms {
    pub(super) device: Arc<str>,
    pub(super) asking: Asking,
    pub(super) memory: GuestMemory,
    /// What the guest sees, if it sees the device.
    pub(super) kind: Option<DeviceKind>,
    pub(super) events: Arc<[Events]>,
    /// Is signalled when the configuration space has changed.
    pub(super) changed: EventFd,
    pub(super) used_rings: Arc<UsedRings>,
    /// Is kept up to date.
    pub(super) offer: Arc<Mutex<Offer>>,
}

/// The connection.
pub(super) struct Session {
    device: Arc<str>,
    asking: Asking,
    frontend: Frontend,
    socket: UnixStream,
    turn: Turn,
    memory: GuestMemory,
    kind: Option<DeviceKind>,
    changed: EventFd,
    offer: Arc<Mutex<Offer>>,
    protocol: VhostUserProtocolFeatures,
    offered: u64,
    /// What the guest's driver took of it.
    features: u64,
    rings: Vec<ActiveRing>,
    used_rings: Arc<UsedRings>,
    events: Arc<[Events]>,
    log: Option<Arc<VhostLog>>,
    requests: Option<Requests>,
}

impl Session {
    /// Over one connection, of which there are two descriptors.
    pub(super) fn new(sockets: [UnixStream; 2], turn: Turn, terms: Terms) -> Self {
        let [main, socket] = sockets;
        let Terms { device, asking, memory, kind, events, changed, used_rings, offer } = terms;
        Self {
            device,
            asking,
            frontend: Frontend::from_stream(main, events.len() as u64),
            socket,
            turn,
            memory,
            kind,
            changed,
            offer,
            protocol: VhostUserProtocolFeatures::empty(),
            offered: 0,
            features: 0,
            rings: Vec::new(),
            used_rings,
            events,
            log: None,
            requests: None,
        }
    }

    /// The connection is new.
    pub(super) fn negotiate(&mut self) -> Result<(), VhostUserError> {
        self.ask("SET_OWNER", |frontend| frontend.set_owner())?;
        self.agree()?;
        let table = self.memory.table(&self.device)?;
        self.ask("SET_MEM_TABLE", |frontend| frontend.set_mem_table(&table.regions))?;
        Ok(())
    }

    /// Agrees on what the protocol can do.
    fn agree(&mut self) -> Result<(), VhostUserError> {
        // Answers are requested again when that is agreed on.
        self.frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
        let offered = self.ask("GET_FEATURES", |frontend| frontend.get_features())?;
        for (bit, name) in
            [(PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"), (LOG_ALL, "VHOST_F_LOG_ALL")]
        {
            if offered & bit == 0 {
                return Err(self.lacks(name));
            }
        }
        self.offered = offered & !(PROTOCOL_FEATURES | LOG_ALL | RING_PACKED);
        let known = self.ask("GET_PROTOCOL_FEATURES", |frontend| frontend.get_protocol_features())?;
        let has_state = known.contains(VhostUserProtocolFeatures::DEVICE_STATE);
        if !known.contains(VhostUserProtocolFeatures::LOG_SHMFD) {
            return Err(self.lacks("VHOST_USER_PROTOCOL_F_LOG_SHMFD"));
        }
        // Of a device of which nothing is known it must be assumed that it has a state.
        if !has_state && self.kind.as_ref().is_none_or(DeviceKind::needs_state) {
            return Err(self.lacks("VHOST_USER_PROTOCOL_F_DEVICE_STATE"));
        }
        let mut features = self.offered;
        if let Some(kind) = &self.kind {
            features = kind.features(self.offered).map_err(|name| self.lacks(&name))?;
        }
        let mut wanted = VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::DEVICE_STATE
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE;
        if self.kind.is_some() && known.contains(VhostUserProtocolFeatures::CONFIG) {
            wanted |= VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::BACKEND_REQ;
        }
        self.protocol = known & wanted;
        let agreed = self.protocol;
        self.ask("SET_PROTOCOL_FEATURES", |frontend| frontend.set_protocol_features(agreed))?;
        if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        if agreed.contains(VhostUserProtocolFeatures::MQ) {
            let queues = self.ask("GET_QUEUE_NUM", |frontend| frontend.get_queue_num())?;
            if queues < self.events.len() as u64 {
                return Err(self.lacks(&format!("{} queues, it has {queues}", self.events.len())));
            }
        }
        if agreed.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
            let device = Arc::clone(&self.device);
            let what = "making a connection for the back end's requests";
            let listen = || Requests::listen(&device, self.changed.try_clone()?);
            let (requests, theirs) = listen().map_err(|source| VhostUserError::System {
                device: Arc::clone(&device),
                what,
                source,
            })?;
            self.ask("SET_BACKEND_REQ_FD", |frontend| frontend.set_backend_request_fd(&theirs))?;
            // The one before is closed when the back end knows the new one.
            self.requests = Some(requests);
        }
        *self.offer.lock() = Offer { features, of_back_end: features & self.offered, has_state };
        Ok(())
    }

    /// The configuration space as it is now.
    pub(super) fn space(&mut self) -> Result<Vec<u8>, VhostUserError> {
        let refuse = |device, rule| VhostUserError::Space { device, rule };
        let Some(kind) = self.kind.clone() else {
            return Err(refuse(Arc::clone(&self.device), "no guest sees it".to_owned()));
        };
        self.check_turn("GET_CONFIG")?;
        let mut said = None;
        if self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            let room = vec![0; kind.space_bytes()];
            let (bytes, flags) = (room.len() as u32, VhostUserConfigFlags::empty());
            said = Some(self.ask("GET_CONFIG", |frontend| frontend.get_config(0, bytes, flags, &room))?.1);
        }
        kind.space(self.events.len(), said, self.offered)
            .map_err(|rule| refuse(Arc::clone(&self.device), rule))
    }

    /// Serves the rings of the guest's driver, which is ready. They may have come with the guest, and run already.
    pub(super) fn serve(&mut self, configuration: &Configuration) -> Result<(), VhostUserError> {
        let place = |ring: &Ring| Ring { base: 0, ..*ring };
        let ours = self.rings.iter().map(|active| place(&active.ring));
        let is_the_same = self.features == configuration.features
            && !self.rings.is_empty()
            && ours.eq(configuration.rings.iter().map(place));
        if !is_the_same {
            self.adopt(configuration)?;
        }
        self.run()
    }

    /// A state can be moved only while no ring runs.
    pub(super) fn check_stopped(&self, call: &'static str) -> Result<(), VhostUserError> {
        if self.may_run() { Err(self.out_of_order(call, "its rings run")) } else { Ok(()) }
    }

    /// The rings that the guest's driver or the source set up, all stopped. Nothing is said to the back end yet: its
    /// look at the used rings must wait until RAM is whole.
    pub(super) fn adopt(&mut self, configuration: &Configuration) -> Result<(), VhostUserError> {
        self.check_stopped("setting rings up")?;
        self.check_offered(configuration.features)?;
        if configuration.rings.len() > self.events.len().min(RINGS_MAX) {
            let rule = "there are more rings than the device has queues";
            return Err(VhostUserError::Ring {
                device: Arc::clone(&self.device),
                ring: self.events.len(),
                rule,
            });
        }
        let check = |(index, ring): (usize, &Ring)| {
            let (addresses, used) = ring.check(&self.device, index, &self.memory)?;
            Ok(ActiveRing {
                ring: *ring,
                addresses,
                used,
                serving: Serving::No,
                may_owe: false,
                takes_kicks: false,
            })
        };
        self.rings =
            configuration.rings.iter().enumerate().map(check).collect::<Result<_, VhostUserError>>()?;
        self.features = configuration.features;
        Ok(())
    }

    fn check_offered(&self, features: u64) -> Result<(), VhostUserError> {
        match features & !self.offered {
            // What the back end offers is known when it has been asked.
            missing if missing != 0 && self.turn == Turn::Ours => {
                Err(self.lacks(&format!("the features {missing:#x}, which the guest's driver uses")))
            }
            _ => Ok(()),
        }
    }

    /// What [`Session::adopt`] takes at the other side.
    pub(super) fn configuration(&self) -> Result<Configuration, VhostUserError> {
        self.check_stopped("asking for its configuration")?;
        let rings = self.rings.iter().map(|active| active.ring).collect();
        Ok(Configuration { features: self.features, rings })
    }

    /// Starts every ring that is stopped, where it stopped. One of which nobody knows whether it runs is stopped first,
    /// to learn how far it has got.
    pub(super) fn run(&mut self) -> Result<(), VhostUserError> {
        self.check_turn("SET_FEATURES")?;
        if self.rings.iter().all(|ring| ring.serving == Serving::Yes) {
            return Ok(());
        }
        self.set_features()?;
        for index in 0..self.rings.len() {
            if self.rings[index].serving == Serving::Unknown {
                self.wait_for_kicks();
                self.stop_ring(index)?;
            }
            if self.rings[index].serving == Serving::No {
                self.start_ring(index)?;
            }
        }
        Ok(())
    }

    /// Stops every ring and notes how far it got. On return the back end has done and logged all that it took.
    pub(super) fn stop(&mut self) -> Result<(), VhostUserError> {
        self.drain()?;
        self.stop_rings()
    }

    fn stop_rings(&mut self) -> Result<(), VhostUserError> {
        self.wait_for_kicks();
        for index in 0..self.rings.len() {
            if self.rings[index].serving != Serving::No {
                self.stop_ring(index)?;
            }
        }
        (0..self.rings.len()).try_for_each(|index| self.wait_for_returns(index))
    }

    /// Lets the back end note what it writes in `log`, or not any more. Its rings run on.
    pub(super) fn set_log(&mut self, log: Option<Arc<VhostLog>>) -> Result<(), VhostUserError> {
        self.check_turn("SET_LOG_BASE")?;
        if let Some(log) = &log {
            self.asking.set("SET_LOG_BASE");
            log_base::set(&self.socket, log).map_err(|error| {
                let (device, request) = (Arc::clone(&self.device), "SET_LOG_BASE");
                match error {
                    LogBaseError::Io(source) if is_out_of_descriptors(&source) => {
                        VhostUserError::System { device, what: "handing the log over", source }
                    }
                    LogBaseError::Io(_) => VhostUserError::Gone { device, request },
                    LogBaseError::Rule(rule) => VhostUserError::Misbehaved { device, request, rule },
                }
            })?;
        }
        self.used_rings.set_logged(log.is_some());
        // Who takes kicks shows best while the guest runs; a failure only shortens the wait at the stop.
        let _ = self.look_at_kicks();
        let before = std::mem::replace(&mut self.log, log);
        let set = self.set_features();
        if set.is_err() {
            self.log = before;
        }
        // What was started in half before is tried again.
        let resumed = if self.may_run() { self.run() } else { Ok(()) };
        set.and(resumed)
    }

    /// Gives the back end its end of the pipe; it may answer with a descriptor of its own, to be used instead.
    pub(super) fn transfer(
        &mut self,
        direction: StateDirection,
        end: OwnedFd,
    ) -> Result<Option<File>, VhostUserError> {
        self.check_stopped("moving its state")?;
        let way = match direction {
            StateDirection::Save => VhostTransferStateDirection::SAVE,
            StateDirection::Load => VhostTransferStateDirection::LOAD,
        };
        let phase = VhostTransferStatePhase::STOPPED;
        self.ask("SET_DEVICE_STATE_FD", |frontend| frontend.set_device_state_fd(way, phase, end))
    }

    /// Whether the transfer that is over was a good one.
    pub(super) fn check(&mut self, direction: StateDirection) -> Result<(), VhostUserError> {
        self.ask("CHECK_DEVICE_STATE", |frontend| frontend.check_device_state()).map_err(
            |error| match error {
                VhostUserError::Refused { device, .. } => VhostUserError::State { device, direction },
                other => other,
            },
        )
    }

    /// Forgets what was loaded. A ring that may still run, because nobody could stop it in time, is stopped now.
    pub(super) fn reset(&mut self) -> Result<(), VhostUserError> {
        self.check_turn("RESET_DEVICE")?;
        // Whoever resets it wants no answers; but a back end may not survive a stop with requests in work.
        let drained = self.drain();
        let stopped = self.stop_rings().and(drained);
        self.rings.clear();
        self.features = 0;
        if self.protocol.contains(VhostUserProtocolFeatures::RESET_DEVICE) {
            return self.ask("RESET_DEVICE", |frontend| frontend.reset_device());
        }
        stopped
    }

    /// Says which features hold. On return the back end keeps to them: it said so, or answered something later.
    fn set_features(&mut self) -> Result<(), VhostUserError> {
        let log = if self.log.is_some() { LOG_ALL } else { 0 };
        let features = self.features | PROTOCOL_FEATURES | log;
        self.ask("SET_FEATURES", |frontend| frontend.set_features(features))?;
        if !self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            self.ask("GET_FEATURES", |frontend| frontend.get_features())?;
        }
        Ok(())
    }

    fn start_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        let ActiveRing { ring, addresses, .. } = self.rings[index];
        let events = Arc::clone(&self.events);
        let events = &events[index];
        self.ask("SET_VRING_NUM", |frontend| frontend.set_vring_num(index, ring.size))?;
        self.ask("SET_VRING_BASE", |frontend| frontend.set_vring_base(index, ring.base))?;
        self.ask("SET_VRING_ADDR", |frontend| frontend.set_vring_addr(index, &addresses))?;
        self.ask("SET_VRING_CALL", |frontend| frontend.set_vring_call(index, &events.call))?;
        // From here on it may run, whatever the rest says.
        (self.rings[index].serving, self.rings[index].may_owe) = (Serving::Unknown, false);
        self.ask("SET_VRING_KICK", |frontend| frontend.set_vring_kick(index, &events.kick))?;
        self.ask("SET_VRING_ENABLE", |frontend| frontend.set_vring_enable(index, true))?;
        // For what the guest made available while nobody looked; and for what was used but not told.
        for event in [&events.kick, &events.call] {
            event.write(1).map_err(|source| VhostUserError::System {
                device: Arc::clone(&self.device),
                what: "kicking a ring",
                source,
            })?;
        }
        self.rings[index].serving = Serving::Yes;
        Ok(())
    }

    fn stop_ring(&mut self, index: usize) -> Result<(), VhostUserError> {
        self.rings[index].serving = Serving::Unknown;
        let base = self.ask("GET_VRING_BASE", |frontend| frontend.get_vring_base(index))?;
        let Ok(base) = u16::try_from(base) else {
            return Err(VhostUserError::Misbehaved {
                device: Arc::clone(&self.device),
                request: "GET_VRING_BASE",
                rule: format!("a split ring has no entry {base}"),
            });
        };
        let ring = &mut self.rings[index];
        // A guest's driver sees the device, so its used rings are what they should be.
        (ring.ring.base, ring.serving, ring.may_owe) = (base, Serving::No, self.kind.is_some());
        self.used_rings.stopped(self.rings[index].used);
        Ok(())
    }

    /// There are rings, or features that a driver took.
    pub(super) fn is_set_up(&self) -> bool {
        !self.rings.is_empty() || self.features != 0
    }

    fn may_run(&self) -> bool {
        self.rings.iter().any(|ring| ring.serving != Serving::No)
    }

    fn ask<T>(
        &mut self,
        request: &'static str,
        ask: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, VhostUserError> {
        self.check_turn(request)?;
        self.asking.set(request);
        ask(&mut self.frontend).map_err(|error| VhostUserError::of(&self.device, request, error))
    }

    fn lacks(&self, feature: &str) -> VhostUserError {
        VhostUserError::Lacks { device: Arc::clone(&self.device), feature: feature.to_owned() }
    }

    fn out_of_order(&self, call: &'static str, state: &'static str) -> VhostUserError {
        VhostUserError::OutOfOrder { device: Arc::clone(&self.device), call, state }
    }
}

/// Descriptors on their way are counted: the one failure of a connection that is not the back end's.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::TOOMANYREFS.raw_os_error())
}
