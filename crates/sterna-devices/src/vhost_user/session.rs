//! A session with a back end: the negotiated features and the rings that run. It lives on the device's
//! thread, because every call may wait for the back end without a limit.

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
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
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
/// Packed rings are not offered. A position in such a ring does not fit the library's
/// SET_VRING_BASE.
const RING_PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;

/// The eventfds of one queue. They stay the same when the ring stops and starts.
#[derive(Debug)]
pub(super) struct Events {
    /// Signalled after the guest has made entries available.
    pub(super) kick: EventFd,
    /// Signalled after the device has used entries.
    pub(super) call: EventFd,
}

/// A ring, and whether the back end serves it.
struct ActiveRing {
    ring: Ring,
    addresses: VringConfigData,
    used: Pages,
    serving: Serving,
    /// Whether a stopped ring's back end may not have returned all entries that it took.
    may_owe: bool,
    /// Whether the back end was seen to read a kick.
    takes_kicks: bool,
}

/// Whether the back end serves a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serving {
    No,
    /// A start or a stop failed half-way. The back end may serve the ring, and only it knows its position.
    Unknown,
    Yes,
}

/// Properties of the back end that callers outside the session need.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Offer {
    /// Features that a driver may choose.
    pub(super) features: u64,
    /// Those of `features` that the back end offers, without the front end's own.
    pub(super) of_back_end: u64,
    /// Whether the device has state in addition to its rings.
    pub(super) has_state: bool,
}

/// The parameters of a session.
pub(super) struct Terms {
    pub(super) device: Arc<str>,
    pub(super) asking: Asking,
    pub(super) memory: GuestMemory,
    /// Kind of the device for a guest. `None` if no guest sees it.
    pub(super) kind: Option<DeviceKind>,
    pub(super) events: Arc<[Events]>,
    /// Signalled after the configuration space has changed.
    pub(super) changed: EventFd,
    pub(super) used_rings: Arc<UsedRings>,
    /// Updated by the session after each negotiation.
    pub(super) offer: Arc<Mutex<Offer>>,
}

/// The session on one connection.
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
    /// The features that the guest's driver chose.
    features: u64,
    rings: Vec<ActiveRing>,
    used_rings: Arc<UsedRings>,
    events: Arc<[Events]>,
    log: Option<Arc<VhostLog>>,
    requests: Option<Requests>,
}

impl Session {
    /// Creates a session. Both `sockets` are descriptors of the same connection.
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

    /// Negotiates on a new connection.
    pub(super) fn negotiate(&mut self) -> Result<(), VhostUserError> {
        self.ask("SET_OWNER", |frontend| frontend.set_owner())?;
        self.agree()?;
        let table = self.memory.table(&self.device)?;
        self.ask("SET_MEM_TABLE", |frontend| frontend.set_mem_table(&table.regions))?;
        Ok(())
    }

    /// Negotiates the features of the protocol and of virtio.
    fn agree(&mut self) -> Result<(), VhostUserError> {
        // Cleared before the negotiation, which enables the request for replies again.
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
        // A device of unknown kind must be assumed to have state.
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
                return Err(
                    self.lacks(&format!("{} queues, but the back end has {queues}", self.events.len()))
                );
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
            // The previous connection is closed after the back end knows the new one.
            self.requests = Some(requests);
        }
        *self.offer.lock() = Offer { features, of_back_end: features & self.offered, has_state };
        Ok(())
    }

    /// Reads the present configuration space.
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

    /// Serves the rings of a driver that is ready. The rings may have been handed over with the guest, and
    /// run already.
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

    /// Refuses `call` while a ring may run. State can be moved only while all rings are stopped.
    pub(super) fn check_stopped(&self, call: &'static str) -> Result<(), VhostUserError> {
        if self.may_run() { Err(self.out_of_order(call, "its rings run")) } else { Ok(()) }
    }

    /// Takes over the rings of the guest's driver or of the source, all stopped. The back end gets no request
    /// yet, because it reads the used rings, and RAM must be complete before.
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
            // The back end's features are known only after it was asked.
            missing if missing != 0 && self.turn == Turn::Ours => {
                Err(self.lacks(&format!("the features {missing:#x}, which the guest's driver uses")))
            }
            _ => Ok(()),
        }
    }

    /// The record that [`Session::adopt`] takes over at the other side.
    pub(super) fn configuration(&self) -> Result<Configuration, VhostUserError> {
        self.check_stopped("requesting its configuration")?;
        let rings = self.rings.iter().map(|active| active.ring).collect();
        Ok(Configuration { features: self.features, rings })
    }

    /// Starts every stopped ring at its position. A ring in an unknown state is stopped first, to read its
    /// position.
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

    /// Stops every ring and records its position. On return the back end has finished and logged all entries
    /// that it took.
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

    /// Makes the back end record its writes in `log`, or stop recording. Its rings continue to run.
    pub(super) fn set_log(&mut self, log: Option<Arc<VhostLog>>) -> Result<(), VhostUserError> {
        self.check_turn("SET_LOG_BASE")?;
        if let Some(log) = &log {
            self.asking.set("SET_LOG_BASE");
            log_base::set(&self.socket, log).map_err(|error| {
                let (device, request) = (Arc::clone(&self.device), "SET_LOG_BASE");
                match error {
                    LogBaseError::Io(source) if is_out_of_descriptors(&source) => {
                        VhostUserError::System { device, what: "passing the log on", source }
                    }
                    LogBaseError::Io(_) => VhostUserError::Gone { device, request },
                    LogBaseError::Rule(rule) => VhostUserError::Misbehaved { device, request, rule },
                }
            })?;
        }
        self.used_rings.set_logged(log.is_some());
        // Running guests show best whether the back end reads kicks. A failure only shortens the wait at the
        // stop.
        let _ = self.look_at_kicks();
        let before = std::mem::replace(&mut self.log, log);
        let set = self.set_features();
        if set.is_err() {
            self.log = before;
        }
        // Retries a start that failed half-way before.
        let resumed = if self.may_run() { self.run() } else { Ok(()) };
        set.and(resumed)
    }

    /// Gives the back end its end of the pipe. The back end may answer with its own descriptor, which is then
    /// used instead.
    pub(super) fn transfer(
        &mut self,
        direction: StateDirection,
        end: OwnedFd,
    ) -> Result<Option<File>, VhostUserError> {
        self.check_stopped("transferring its state")?;
        let way = match direction {
            StateDirection::Save => VhostTransferStateDirection::SAVE,
            StateDirection::Load => VhostTransferStateDirection::LOAD,
        };
        let phase = VhostTransferStatePhase::STOPPED;
        self.ask("SET_DEVICE_STATE_FD", |frontend| frontend.set_device_state_fd(way, phase, end))
    }

    /// Asks the back end whether the completed transfer succeeded.
    pub(super) fn check(&mut self, direction: StateDirection) -> Result<(), VhostUserError> {
        self.ask("CHECK_DEVICE_STATE", |frontend| frontend.check_device_state()).map_err(
            |error| match error {
                VhostUserError::Refused { device, .. } => VhostUserError::State { device, direction },
                other => other,
            },
        )
    }

    /// Discards a loaded state. A ring that may still run, because a stop timed out, is stopped now.
    pub(super) fn reset(&mut self) -> Result<(), VhostUserError> {
        self.check_turn("RESET_DEVICE")?;
        // The driver that resets the device needs no answers. But a back end may not survive a stop with
        // requests in progress.
        let drained = self.drain();
        let stopped = self.stop_rings().and(drained);
        self.rings.clear();
        self.features = 0;
        if self.protocol.contains(VhostUserProtocolFeatures::RESET_DEVICE) {
            return self.ask("RESET_DEVICE", |frontend| frontend.reset_device());
        }
        stopped
    }

    /// Sets the active features. On return the back end applies them: it has acknowledged them, or has
    /// answered a later request.
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
        // From here on the ring may run, even if a later request fails.
        (self.rings[index].serving, self.rings[index].may_owe) = (Serving::Unknown, false);
        self.ask("SET_VRING_KICK", |frontend| frontend.set_vring_kick(index, &events.kick))?;
        self.ask("SET_VRING_ENABLE", |frontend| frontend.set_vring_enable(index, true))?;
        // A kick for entries that the guest made available in the meantime, and a call for entries that were
        // used without a notification.
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
        // A device that a guest's driver uses has valid used rings.
        (ring.ring.base, ring.serving, ring.may_owe) = (base, Serving::No, self.kind.is_some());
        self.used_rings.stopped(self.rings[index].used);
        Ok(())
    }

    /// Whether the session has rings, or features that a driver chose.
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

/// Whether too many descriptors are in flight. This is the only failure of a connection that the back end
/// does not cause.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::TOOMANYREFS.raw_os_error())
}
