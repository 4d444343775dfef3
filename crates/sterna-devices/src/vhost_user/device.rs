//! [`VhostUserDevice`], the VMM's handle of a vhost-user device.

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

/// Socket, kind and time limits of a vhost-user device.
#[derive(Debug, Clone)]
pub struct VhostUserOptions {
    /// Name of the device in errors and in the stream. It must be equal on both sides.
    pub name: String,
    /// Path of the back end's socket.
    pub socket: PathBuf,
    /// Kind of the device for a guest. `None` if no guest sees it; the caller that knows its rings then uses
    /// [`VhostUserDevice::start`].
    pub kind: Option<DeviceKind>,
    /// Number of queues, see [`DeviceKind::queues`].
    pub queues: usize,
    /// Time limit of a request. A back end that must stop first finishes the requests it has begun.
    pub answer_limit: Duration,
    /// Longest time without progress while the state is transferred.
    pub state_limit: Duration,
    /// Estimated size of the state in bytes, because the protocol does not report it. For the expected
    /// downtime.
    pub expected_state_bytes: u64,
    /// Estimated transfer rate of the state. For the expected downtime.
    pub expected_bytes_per_second: Option<u64>,
}

impl VhostUserOptions {
    /// One queue, and limits of 30 s for an answer and for the state's progress.
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

/// A virtio device whose back end is another process. Its state migrates as a [`sterna::DeviceStream`]. With
/// `mode` `cpr-transfer` the connection itself is handed over as [`sterna::HostDescriptors`].
///
/// Dropping it closes the connection. Most back ends end then.
pub struct VhostUserDevice {
    pub(super) name: Arc<str>,
    pub(super) options: VhostUserOptions,
    pub(super) transfer: Mutex<Transfer>,
    pub(super) offer: Arc<Mutex<Offer>>,
    /// `None` while another process has the back end.
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
    /// - [`VhostUserError::Connect`]
    /// - [`VhostUserError::Lacks`] for a back end that cannot be migrated
    /// - [`VhostUserError::Memory`] for RAM that cannot be shared with another process
    /// - every error of a request
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

    /// A device whose back end another process of this host has. That process hands the back end over with
    /// the guest and its memory ([`sterna::HostDescriptors`]). This call makes no connection. The back end
    /// gets no request from this process before the guest runs here.
    ///
    /// # Errors
    /// [`VhostUserError::Memory`] as in [`VhostUserDevice::connect`]; [`VhostUserError::System`].
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

    /// The device's name, as in its options.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kind of the device for a guest. `None` if no guest sees it.
    pub fn kind(&self) -> Option<&DeviceKind> {
        self.options.kind.as_ref()
    }

    /// Features that a driver may choose: those of virtio and of the device.
    pub fn offered_features(&self) -> u64 {
        self.offer.lock().features
    }

    /// Whether the device has state in addition to its rings.
    pub fn has_state(&self) -> bool {
        self.offer.lock().has_state
    }

    /// Number of queues that the device has.
    pub fn queues(&self) -> usize {
        self.events.len()
    }

    /// Eventfd to signal after the guest has made entries of queue `queue` available.
    pub fn kick(&self, queue: usize) -> Option<&EventFd> {
        Some(&self.events.get(queue)?.kick)
    }

    /// Eventfd that the back end signals after it has used entries of queue `queue`.
    pub fn call(&self, queue: usize) -> Option<&EventFd> {
        Some(&self.events.get(queue)?.call)
    }

    /// Starts the rings after the guest's driver is ready. `features` are the driver's, and `rings` begins
    /// with queue 0. The back end serves the rings from now on.
    ///
    /// # Errors
    /// [`VhostUserError::Ring`], [`VhostUserError::Lacks`], rings that already run, and every error of a
    /// request.
    pub fn start(&self, features: u64, rings: &[Ring]) -> Result<(), VhostUserError> {
        let configuration = Configuration { features, rings: rings.to_vec() };
        self.call_session(move |session| {
            session.adopt(&configuration)?;
            session.run()
        })
    }

    /// The present configuration space, as the driver reads it. Zeros for a device that waits for its back
    /// end.
    ///
    /// # Errors
    /// [`VhostUserError::Space`] if it breaks a rule of the [`DeviceKind`], or no guest sees the device. Also
    /// every error of a request.
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

    /// Eventfd that is signalled after the configuration space has changed.
    pub fn changed(&self) -> &EventFd {
        &self.changed
    }

    /// Like [`VhostUserDevice::start`], for rings that may have been handed over with the guest. Such rings
    /// may run already. Features that only the front end implements are not sent to the back end.
    ///
    /// # Errors
    /// The same as for [`VhostUserDevice::start`].
    pub fn serve(&self, features: u64, rings: &[Ring]) -> Result<(), VhostUserError> {
        let kind = self.options.kind.as_ref().map_or(0, DeviceKind::features_of_front_end);
        let offer = *self.offer.lock();
        let only_ours = offer.features & !offer.of_back_end | kind;
        let configuration = Configuration { features: features & !only_ours, rings: rings.to_vec() };
        self.call_session(move |session| session.serve(&configuration))
    }

    /// Stops and forgets the rings after the guest's driver has reset the device.
    ///
    /// # Errors
    /// Every error of a request.
    pub fn reset(&self) -> Result<(), VhostUserError> {
        self.call_session(|session| if session.is_set_up() { session.reset() } else { Ok(()) })
    }

    /// The stopped rings, with the position of the back end in each.
    ///
    /// # Errors
    /// [`VhostUserError::OutOfOrder`] while they run.
    pub fn rings(&self) -> Result<Vec<Ring>, VhostUserError> {
        Ok(self.call_session(|session| session.configuration())?.rings)
    }

    /// Adds the end of the connection to `events`, as `data`. The event remains set after it has occurred.
    ///
    /// # Errors
    /// The kernel refuses the registration.
    pub fn watch_end(&self, events: &Epoll, data: u64) -> io::Result<()> {
        let link = self.link().map_err(io::Error::other)?;
        ended::watch(&link.socket, events, data)
    }

    /// Checks that the back end's connection is open.
    ///
    /// # Errors
    /// [`VhostUserError::Ended`] if the back end has ended. An error as well if another process has the back
    /// end.
    pub fn check_alive(&self) -> Result<(), VhostUserError> {
        match ended::has_come(&self.link()?.socket) {
            false => Ok(()),
            true => Err(VhostUserError::Ended { device: Arc::clone(&self.name) }),
        }
    }

    /// Creates a link over a connection to a back end.
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

    /// The link to the back end.
    pub(super) fn link(&self) -> Result<Arc<Link>, VhostUserError> {
        let link = self.link.lock().clone();
        link.ok_or_else(|| VhostUserError::Awaited { device: Arc::clone(&self.name) })
    }

    /// Runs `job` on the session's thread and waits for its result.
    pub(super) fn call_session<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Session) -> Result<T, VhostUserError> + Send + 'static,
    ) -> Result<T, VhostUserError> {
        self.link()?.worker.call(job)
    }

    /// Runs `job` on the session's thread without waiting for it.
    pub(super) fn tell_session(&self, job: impl FnOnce(&mut Session) + Send + 'static) {
        // A back end that another process has needs no such request.
        if let Ok(link) = self.link() {
            link.worker.post(job);
        }
    }

    /// Makes the back end record its writes in `log`, which was started. The recording is active on return.
    pub(super) fn start_log(&self, log: &Arc<VhostLog>) -> Result<(), VhostUserError> {
        let log = Arc::clone(log);
        self.call_session(move |session| session.set_log(Some(log)))
    }

    /// Ends the recording of the back end's writes.
    pub(super) fn stop_log(&self) -> Result<(), VhostUserError> {
        self.call_session(|session| session.set_log(None))
    }

    /// Merges the used rings that stopped after the last sync. The log does not contain them. Returns the
    /// number of newly dirty pages.
    pub(super) fn sync_used_rings(&self, into: &mut DirtyBitmaps) -> u64 {
        self.used_rings.sync(into)
    }
}

impl fmt::Debug for VhostUserDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserDevice").field("options", &self.options).finish_non_exhaustive()
    }
}
