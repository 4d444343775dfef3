//! The device as a VMM has it.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna_ram::GuestRam;
use sterna_ram::dirty::{DirtyBitmaps, LoggedRange, VhostLog};
use vmm_sys_util::epoll::Epoll;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::configuration::Configuration;
use super::ended;
use super::error::VhostUserError;
use super::kind::DeviceKind;
use super::link::Link;
use super::memory::GuestMemory;
use super::ring::Ring;
use super::session::{Events, Offer, Session, Terms};
use super::transfer::Transfer;
use super::turn::Turn;
use super::used_rings::UsedRings;
use super::worker::Asking;
use crate::connect;

/// Where a device's back end is, and how long it may take.
#[derive(Debug, Clone)]
pub struct VhostUserOptions {
    /// What errors and the stream call the device: the same on both sides.
    pub name: String,
    /// Where the back end listens.
    pub socket: PathBuf,
    /// What a guest sees of it. Without it no guest does: whoever knows where rings are says so by [`VhostUserDevice::start`].
    pub kind: Option<DeviceKind>,
    /// Queues that the device has: [`DeviceKind::queues`].
    pub queues: usize,
    /// How long a request may go unanswered. A back end that is told to stop first finishes what it has begun.
    pub answer_limit: Duration,
    /// How long its state may stand still while it moves.
    pub state_limit: Duration,
    /// How large its state is, as far as one knows: the protocol does not tell. For the expected downtime.
    pub expected_state_bytes: u64,
    /// How fast it moves, if one knows. For the expected downtime.
    pub expected_bytes_per_second: Option<u64>,
}

impl VhostUserOptions {
    /// One queue; half a minute for an answer and for the state to move on.
    pub fn new(name: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            socket: socket.into(),
            kind: None,
            queues: 1,
            answer_limit: Duration::from_secs(30),
            state_limit: Duration::from_secs(30),
            expected_state_bytes: 0,
            expected_bytes_per_second: None,
        }
    }
}

/// A virtio device whose back end is another process. Its state moves as a [`sterna::DeviceStream`], or with `mode` `cpr-transfer`
/// the connection itself moves, as [`sterna::HostDescriptors`].
///
/// Dropping it closes the connection; most back ends end then.
pub struct VhostUserDevice {
    pub(super) name: Arc<str>,
    pub(super) options: VhostUserOptions,
    pub(super) transfer: Mutex<Transfer>,
    pub(super) offer: Arc<Mutex<Offer>>,
    /// None while another process has the back end.
    pub(super) link: Mutex<Option<Arc<Link>>>,
    pub(super) memory: GuestMemory,
    pub(super) changed: EventFd,
    pub(super) events: Arc<[Events]>,
    pub(super) used_rings: Arc<UsedRings>,
}

impl VhostUserDevice {
    /// Connects to the back end and gives it `ram`, which the guest sees at `ranges`.
    ///
    /// # Errors
    /// [`VhostUserError::Connect`]; [`VhostUserError::Lacks`] for a back end that cannot be migrated;
    /// [`VhostUserError::Memory`] for RAM that no other process can have; whatever a request can fail with.
    pub fn connect(
        options: VhostUserOptions,
        ram: &GuestRam,
        ranges: &[LoggedRange],
    ) -> Result<Arc<Self>, VhostUserError> {
        let device = Self::awaiting(options, ram, ranges)?;
        let main =
            connect::within(device.options.answer_limit, &device.options.socket).map_err(|source| {
                let (device, socket) = (Arc::clone(&device.name), device.options.socket.clone());
                VhostUserError::Connect { device, socket, source }
            })?;
        let link = device.link_over(main, Turn::Ours)?;
        link.worker.call(Session::negotiate)?;
        *device.link.lock() = Some(Arc::new(link));
        Ok(device)
    }

    /// A device whose back end another process of this host has, and will hand over with the guest and its memory
    /// ([`sterna::HostDescriptors`]). Nobody is connected to, and until the guest runs here nothing is said to the back end.
    ///
    /// # Errors
    /// [`VhostUserError::Memory`] as of [`VhostUserDevice::connect`]; [`VhostUserError::System`].
    pub fn awaiting(
        options: VhostUserOptions,
        ram: &GuestRam,
        ranges: &[LoggedRange],
    ) -> Result<Arc<Self>, VhostUserError> {
        let name: Arc<str> = options.name.as_str().into();
        let memory = GuestMemory::new(&name, ram, ranges)?;
        let system = |source: io::Error| VhostUserError::System {
            device: Arc::clone(&name),
            what: "making eventfds",
            source,
        };
        let events = (0..options.queues)
            .map(|_| Ok(Events { kick: EventFd::new(EFD_NONBLOCK)?, call: EventFd::new(EFD_NONBLOCK)? }))
            .collect::<io::Result<Arc<[Events]>>>()
            .map_err(system)?;
        let changed = EventFd::new(EFD_NONBLOCK).map_err(system)?;
        Ok(Arc::new(Self {
            name,
            options,
            transfer: Mutex::default(),
            offer: Arc::default(),
            link: Mutex::default(),
            memory,
            changed,
            events,
            used_rings: Arc::default(),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What a guest sees of it, if it sees it.
    pub fn kind(&self) -> Option<&DeviceKind> {
        self.options.kind.as_ref()
    }

    /// The features that a driver may take: those of virtio and of the device.
    pub fn offered_features(&self) -> u64 {
        self.offer.lock().features
    }

    /// Whether it has a state besides its rings, which moves.
    pub fn has_state(&self) -> bool {
        self.offer.lock().has_state
    }

    /// Queues that it has.
    pub fn queues(&self) -> usize {
        self.events.len()
    }

    /// To be signalled when the guest has made entries of queue `queue` available.
    pub fn kick(&self, queue: usize) -> Option<&EventFd> {
        Some(&self.events.get(queue)?.kick)
    }

    /// Is signalled when the device has used entries of queue `queue`.
    pub fn call(&self, queue: usize) -> Option<&EventFd> {
        Some(&self.events.get(queue)?.call)
    }

    /// The guest's driver is ready: it took `features`, and its rings are `rings`, the first that of queue 0. The back
    /// end serves them from now on.
    ///
    /// # Errors
    /// [`VhostUserError::Ring`], [`VhostUserError::Lacks`]; rings run already; whatever a request can fail with.
    pub fn start(&self, features: u64, rings: &[Ring]) -> Result<(), VhostUserError> {
        let configuration = Configuration { features, rings: rings.to_vec() };
        self.call_session(move |session| {
            session.adopt(&configuration)?;
            session.run()
        })
    }

    /// What [`DeviceKind`] asks for: the configuration space as the driver reads it, now. Zeros of a device that waits for its
    /// back end.
    ///
    /// # Errors
    /// [`VhostUserError::Space`] for one that breaks a rule, or of a device that no guest sees; whatever a request can fail with.
    pub fn configuration_space(&self) -> Result<Vec<u8>, VhostUserError> {
        let Some(kind) = self.options.kind.clone() else {
            let (device, rule) = (Arc::clone(&self.name), "no guest sees it".to_owned());
            return Err(VhostUserError::Space { device, rule });
        };
        if self.is_awaited() {
            return Ok(vec![0; kind.space_bytes()]);
        }
        self.call_session(Session::space)
    }

    /// Is signalled when the configuration space has changed.
    pub fn changed(&self) -> &EventFd {
        &self.changed
    }

    /// As [`VhostUserDevice::start`], but the rings may have come with a guest, and run already. Features that are the front
    /// end's alone are no business of the back end's.
    ///
    /// # Errors
    /// As [`VhostUserDevice::start`].
    pub fn serve(&self, features: u64, rings: &[Ring]) -> Result<(), VhostUserError> {
        let kind = self.options.kind.as_ref().map_or(0, DeviceKind::features_of_front_end);
        let offer = *self.offer.lock();
        let only_ours = offer.features & !offer.of_back_end | kind;
        let configuration = Configuration { features: features & !only_ours, rings: rings.to_vec() };
        self.call_session(move |session| session.serve(&configuration))
    }

    /// The guest's driver has reset the device: its rings stop and are forgotten.
    ///
    /// # Errors
    /// Whatever a request can fail with.
    pub fn reset(&self) -> Result<(), VhostUserError> {
        self.call_session(|session| if session.is_set_up() { session.reset() } else { Ok(()) })
    }

    /// The rings, which have stopped, and how far the back end has got with each.
    ///
    /// # Errors
    /// [`VhostUserError::OutOfOrder`] while they run.
    pub fn rings(&self) -> Result<Vec<Ring>, VhostUserError> {
        Ok(self.call_session(|session| session.configuration())?.rings)
    }

    /// Puts the end of the connection among the events of `events`, as `data`. It stays there when it has come.
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch_end(&self, events: &Epoll, data: u64) -> io::Result<()> {
        let link = self.link().map_err(io::Error::other)?;
        ended::watch(&link.socket, events, data)
    }

    /// [`VhostUserError::Ended`] if the back end has ended.
    ///
    /// # Errors
    /// It has, or another process has it.
    pub fn check_alive(&self) -> Result<(), VhostUserError> {
        match ended::has_come(&self.link()?.socket) {
            false => Ok(()),
            true => Err(VhostUserError::Ended { device: Arc::clone(&self.name) }),
        }
    }

    /// A link over that connection to a back end.
    pub(super) fn link_over(&self, main: UnixStream, turn: Turn) -> Result<Link, VhostUserError> {
        let changed = self.changed.try_clone().map_err(|source| VhostUserError::System {
            device: Arc::clone(&self.name),
            what: "making eventfds",
            source,
        })?;
        let terms = Terms {
            device: Arc::clone(&self.name),
            asking: Asking::new(),
            memory: self.memory.clone(),
            kind: self.options.kind.clone(),
            events: Arc::clone(&self.events),
            changed,
            used_rings: Arc::clone(&self.used_rings),
            offer: Arc::clone(&self.offer),
        };
        Link::over(main, turn, self.options.answer_limit, terms)
    }

    /// The connection to the back end.
    pub(super) fn link(&self) -> Result<Arc<Link>, VhostUserError> {
        let link = self.link.lock().clone();
        link.ok_or_else(|| VhostUserError::Awaited { device: Arc::clone(&self.name) })
    }

    /// Has `job` done, and waits for its result.
    pub(super) fn call_session<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Session) -> Result<T, VhostUserError> + Send + 'static,
    ) -> Result<T, VhostUserError> {
        self.link()?.worker.call(job)
    }

    /// Has `job` done, and does not wait for it.
    pub(super) fn tell_session(&self, job: impl FnOnce(&mut Session) + Send + 'static) {
        // A back end that another process has need not hear of it.
        if let Ok(link) = self.link() {
            link.worker.post(job);
        }
    }

    /// The back end notes what it writes in `log` (which was started) when this returns.
    pub(super) fn start_log(&self, log: &Arc<VhostLog>) -> Result<(), VhostUserError> {
        let log = Arc::clone(log);
        self.call_session(move |session| session.set_log(Some(log)))
    }

    /// The back end need not note what it writes any more.
    pub(super) fn stop_log(&self) -> Result<(), VhostUserError> {
        self.call_session(|session| session.set_log(None))
    }

    /// The used rings that have stopped since the last sync, which are not in the log; gives the newly dirty pages.
    pub(super) fn sync_used_rings(&self, into: &mut DirtyBitmaps) -> u64 {
        self.used_rings.sync(into)
    }
}

impl fmt::Debug for VhostUserDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserDevice").field("options", &self.options).finish_non_exhaustive()
    }
}
