//! The destination side of a migration: receives a guest's memory and devices and starts the guest.
//!
//! A listener thread accepts connections while the [`Incoming`] exists. First, the migration's channels
//! connect. Later, a source whose acknowledgement was lost may connect with a question ([`accept`]).
//! A control thread performs the actions that the handover machine requests ([`control`]).
//! A loader thread reads the main channel ([`loader`]).
//! One thread per multifd channel stores pages through [`crate::pages::PageSink`] ([`multifd_lane`]). It synchronises
//! with the flushes on the main channel ([`rounds`]).

mod accept;
mod acks;
mod announced;
mod arrival;
#[cfg(feature = "postcopy")]
mod arriving;
#[cfg(not(feature = "postcopy"))]
#[path = "arriving/off.rs"]
mod arriving;
mod autostart;
mod awaited_vm;
mod carrier;
#[cfg(feature = "standby")]
mod checkpoints;
#[cfg(not(feature = "standby"))]
#[path = "checkpoints/off.rs"]
mod checkpoints;
mod comeback;
mod coming_memory;
mod configuring;
mod control;
mod ending;
#[cfg(feature = "planted-faults")]
mod fault;
mod file;
pub(crate) mod follower;
mod greeting;
mod listening;
mod load_file;
mod loader;
mod memory_files;
mod multifd_lane;
mod places;
#[cfg(feature = "postcopy")]
mod postcopy;
#[cfg(not(feature = "postcopy"))]
#[path = "postcopy/off.rs"]
mod postcopy;
mod questions;
#[cfg(feature = "rdma")]
mod rdma;
mod reader;
mod receiver;
mod rounds;
mod sections;
mod shared;
mod shortage;
mod silence;
mod streams;
mod tail;
pub(crate) mod target;
mod transport;
pub(crate) mod vm_target;

use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, current};
use std::time::{Duration, Instant};

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_transport::{Address, CancelFlag, Listener, TlsEndpoint};

pub use arrival::Arrival;
#[cfg(feature = "planted-faults")]
pub use fault::SharingFault;
pub use listening::RecoverError;
pub use sterna_proto::destination::Refusal;

use crate::bell::EventFd;
use crate::events::{Observer, Status};
use crate::params::{Capabilities, Parameters};
use crate::rules::{self, Feature, Features, Side};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::stats::IncomingStatistics;
use crate::threads::hooked;
use crate::vm::TargetVm;
use listening::Listening;
use shared::Shared;
use target::Target;
use transport::interface::{Beginning, Waiting};
use vm_target::VmTarget;

/// Interval at which [`Incoming::settle`] checks whether every thread has ended.
const RELEASE_STEP: Duration = Duration::from_millis(1);

/// The destination's handle of a migration.
///
/// A connection that does not fit this side is refused with a warning ([`crate::Event::Warning`]), and this
/// side waits for the next source. The migration can fail only after all its channels have connected
/// (specs/stream.md §3.1).
///
/// Cloning gives another handle of the same migration. When the last handle is dropped, the address is released
/// and a migration that is not committed fails. A held guest stays loaded in its VM.
///
/// The address can be bound again as soon as that drop returns. The drop waits for the listener thread, so do
/// not drop the last handle while you hold a lock that the observer takes.
///
/// Keep the handle after success: a source that lost the acknowledgement asks here whether the guest has
/// started. [`Incoming::settle`] keeps it as long as needed.
#[derive(Clone)]
pub struct Incoming {
    guard: Arc<Guard>,
}

impl Incoming {
    /// Listens at `at` for a source. The address is bound when this function returns.
    ///
    /// # Errors
    /// [`StartError`] if the address cannot be bound or the settings contradict each other.
    ///
    /// [`StartError::System`] also if [`Parameters::on_thread_start`] panics on the thread `incoming`.
    ///
    /// [`StartError::Guest`] while another migration uses the VM's guest, or if an earlier migration's guest is
    /// still loaded ([`Custody::Arrived`](sterna_ram::Custody::Arrived)). A guest that the VMM
    /// itself has put there is the VMM's responsibility.
    pub fn listen(
        vm: Arc<dyn TargetVm>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let target = VmTarget::new(vm).map_err(StartError::system)?;
        Self::listen_for(Arc::new(target), at, params, capabilities, observer)
    }

    /// As [`Incoming::listen`], for any [`Target`] (a VM, an image or a stored stream).
    #[doc(hidden)]
    pub fn listen_for(
        target: Arc<dyn Target>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        check_settings(&params, &capabilities)?;
        let features = Features::of(at, &params, &capabilities)
            .with(Feature::Image, !target.is_in_memory())
            .with(Feature::StoredImage, target.ram_sink().is_none());
        rules::check(features, Side::Destination)?;
        postcopy::check(target.as_ref(), &capabilities)?;
        let wait = transport::of(at);
        hooked(params.on_thread_start.clone().as_ref(), || {
            Self::begin(wait(Beginning { target, at, params, capabilities, observer })?)
        })
    }

    /// Starts the control thread, and the thread that accepts connections.
    fn begin(Waiting { shared, listen }: Waiting) -> Result<Self, StartError> {
        // The guard exists before the threads: if only one thread starts, dropping the guard ends it.
        let mut guard = Guard { shared: Arc::new(shared), listening: None, recovery: Listening::default() };
        control::spawn(&guard.shared)
            .and_then(|()| listen(&guard.shared))
            .map(|thread| guard.listening = thread)
            .map_err(StartError::system)?;
        Ok(Self { guard: Arc::new(guard) })
    }

    /// As [`Incoming::begin`], without a control thread: it starts with the VM.
    fn begin_without_vm(
        waiting: Shared,
        listen: impl FnOnce(&Arc<Shared>) -> transport::interface::Listening,
    ) -> Result<Self, StartError> {
        let mut guard = Guard { shared: Arc::new(waiting), listening: None, recovery: Listening::default() };
        guard.listening = listen(&guard.shared).map_err(StartError::system)?;
        Ok(Self { guard: Arc::new(guard) })
    }

    /// As [`Incoming::listen`], but accepts a page that arrives twice in a round. A test uses this to show that
    /// memory is corrupted if a source violates the page order and the check is off.
    ///
    /// # Errors
    /// As [`Incoming::listen`].
    #[cfg(feature = "planted-faults")]
    pub fn listen_trusting(
        vm: Arc<dyn TargetVm>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let incoming = Self::listen(vm, at, params, capabilities, observer)?;
        incoming.guard.shared.rounds.trust();
        Ok(incoming)
    }

    /// As [`Incoming::listen`], with a destination that breaks the rules for memory that the source hands over.
    /// A test uses this to show that the source's guest would be damaged and that the damage is detected.
    ///
    /// # Errors
    /// As [`Incoming::listen`].
    #[cfg(feature = "planted-faults")]
    pub fn listen_with_fault(
        vm: Arc<dyn TargetVm>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        fault: SharingFault,
    ) -> Result<Self, StartError> {
        let mut target = VmTarget::new(vm).map_err(StartError::system)?;
        target.fault = Some(fault);
        Self::listen_for(Arc::new(target), at, params, capabilities, observer)
    }

    /// A weak handle for the parts that the migration itself keeps alive.
    #[doc(hidden)]
    pub fn downgrade(&self) -> WeakIncoming {
        WeakIncoming(Arc::downgrade(&self.guard))
    }

    /// The address of the listener, with the port that the kernel chose. After [`Incoming::recover_at`], the
    /// address that it bound last.
    pub fn address(&self) -> Address {
        self.guard.recovery.address().unwrap_or_else(|| self.guard.shared.address.clone())
    }

    /// Listens at `at` as well, for the source of a guest that lacks pages (QMP's `migrate-recover`).
    ///
    /// An address from an earlier call is released. The address of [`Incoming::listen`] stays bound, so the
    /// source may connect to either.
    ///
    /// # Errors
    /// [`RecoverError`] unless the status is [`Status::PostcopyPaused`], if the address cannot be bound, or if
    /// no source can connect to it. An error changes nothing.
    pub fn recover_at(&self, at: &Address) -> Result<(), RecoverError> {
        let shared = self.guard.now();
        let state = shared.driver().map_or(State::Setup, |driver| driver.inspect(Destination::state));
        if state != State::PostcopyPaused {
            return Err(Refusal::NotPostcopyPaused { state }.into());
        }
        let over_descriptor = shared.capabilities.postcopy_preempt && at.is_descriptor();
        let features = Features::of_address(at)
            .with(Feature::Recovery, true)
            .with(Feature::PreemptOverDescriptor, over_descriptor);
        rules::check(features, Side::Destination)?;
        if *at == shared.address || Some(at) == self.guard.recovery.address().as_ref() {
            return Ok(());
        }
        let cancel = CancelFlag::new();
        let (address, thread) = hooked(shared.params.on_thread_start.as_ref(), || {
            let listener = Listener::bind(at).map_err(|error| RecoverError::System(error.into()))?;
            let address = listener.local_address();
            let thread = accept::spawn_beside(shared, listener, cancel.clone());
            Ok::<_, RecoverError>((address, thread.map_err(|error| RecoverError::System(error.into()))?))
        })?;
        self.guard.recovery.put(address, cancel, thread);
        Ok(())
    }

    /// Breaks the connection of a postcopy on purpose (QMP's `migrate-pause`). The guest runs until it touches
    /// a missing page. A Sterna source does not reconnect until its operator requests it.
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PostcopyActive`] or [`Status::PostcopyRecover`].
    pub fn pause(&self) -> Result<(), Refusal> {
        let shared = self.guard.now();
        let state = shared.driver().map_or(State::Setup, |driver| driver.inspect(Destination::state));
        if !matches!(state, State::Postcopy | State::PostcopyRecover) {
            return Err(Refusal::NotPostcopyActive { state });
        }
        // Set before the connection ends, because the source is sent the reason when it ends.
        shared.postcopy.set_paused(true);
        shared.feed(Fed::PauseRequested).inspect_err(|_| shared.postcopy.set_paused(false))
    }

    /// The migration's present status.
    pub fn status(&self) -> Status {
        self.guard.shared.status()
    }

    /// A snapshot of the migration's statistics.
    pub fn statistics(&self) -> IncomingStatistics {
        self.guard.shared.statistics()
    }

    /// Cancels the migration on this side and discards the guest.
    ///
    /// # Errors
    /// [`Refusal`] after the guest was handed over to this side. A held guest ([`Status::Held`]) is refused as
    /// well, because this may be its only copy.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.guard.shared.abandon(false)
    }

    /// As [`Incoming::cancel`], but a held guest is discarded as well.
    ///
    /// Only for an operator who knows that the source runs the guest, or who gives the guest up. A discarded
    /// guest cannot be restored.
    ///
    /// # Errors
    /// [`Refusal`] after the guest was handed over to this side and started.
    pub fn discard(&self) -> Result<(), Refusal> {
        self.guard.shared.abandon(true)
    }

    /// Sets whether a guest that ran at the source starts when it has arrived (default: true).
    ///
    /// With false the guest arrives paused, and the VMM starts it. QMP's `stop` and `cont` use this while the
    /// guest is on its way.
    ///
    /// Returns whether the decision takes effect. It is too late when everything is loaded and the handover has
    /// begun. If the connection is lost during the handover and the source reconnects, the decision can be
    /// changed again.
    #[must_use = "it may be too late"]
    pub fn set_autostart(&self, on: bool) -> bool {
        self.guard.shared.autostart.set(on)
    }

    /// Starts a held guest ([`Status::Held`]), after acquiring the hooks that it lacks.
    ///
    /// If the guest is held because a hook or the start has failed, repair the cause first: after another failure the guest
    /// is held again. If it is held because its source is a QEMU, call this when the QEMU has completed. The call returns
    /// before the guest has started.
    ///
    /// # Errors
    /// [`Refusal`] when no guest is held.
    pub fn release(&self) -> Result<(), Refusal> {
        self.guard.now().feed(Fed::OperatorCont)
    }

    /// The result of the migration, or `None` while it runs.
    pub fn arrival(&self) -> Option<Arrival> {
        self.guard.shared.arrival()
    }

    /// Blocks until the migration has ended, and returns its result.
    pub fn wait(&self) -> Arrival {
        self.guard.shared.wait()
    }

    /// As [`Incoming::wait`], at most for `limit`. `None` if the migration has not ended within that time.
    pub fn wait_timeout(&self, limit: Duration) -> Option<Arrival> {
        self.guard.shared.wait_timeout(limit)
    }

    /// A descriptor that becomes readable at each event and at the end, for a VMM with an event loop.
    ///
    /// # Errors
    /// The kernel gives no further eventfd.
    pub fn event_fd(&self) -> std::io::Result<EventFd> {
        self.guard.shared.bell.listener()
    }

    /// Waits for the end of the migration, answers the source's questions until none has arrived for `quiet`, and
    /// then releases everything.
    ///
    /// A source that lost the acknowledgement first asks within its `limits.acknowledge`, and then once in
    /// `limits.ask_interval` ([`WaitLimits`](crate::WaitLimits)). With the default limits, 60 s are enough. After the
    /// release a source that asks stays undecided until its operator decides.
    ///
    /// After a restore from a file the call waits for no questions.
    ///
    /// On return the port can be bound again, no thread of the migration runs, and the engine holds no clone of the
    /// guest's memory. Call it on the last handle: if another clone of this handle exists, the call releases nothing.
    /// A callback must not call it.
    pub fn settle(self, quiet: Duration) -> Arrival {
        let arrival = self.wait();
        // A file has no source that could ask.
        let quiet = if self.guard.shared.file.is_some() { Duration::ZERO } else { quiet };
        let ended = Instant::now();
        loop {
            let asked = *self.guard.shared.asked.lock();
            let last = asked.map_or(ended, |asked| asked.max(ended));
            let rest = quiet.saturating_sub(last.elapsed());
            if rest.is_zero() {
                break;
            }
            std::thread::sleep(rest);
        }
        // A VM that was made from a configuration has a state of its own.
        let states = [Arc::downgrade(&self.guard.shared), Arc::downgrade(self.guard.now())];
        if let Some(guard) = Arc::into_inner(self.guard) {
            drop(guard);
            // The threads have been ended; each holds the shared state until its last step.
            while states.iter().any(|state| state.strong_count() > 0) {
                std::thread::sleep(RELEASE_STEP);
            }
        }
        arrival
    }
}

/// Checks settings that no rule between two features covers.
fn check_settings(params: &Parameters, capabilities: &Capabilities) -> Result<(), SettingsError> {
    if capabilities.multifd && params.multifd_channels == 0 {
        return Err(SettingsError::NoChannels);
    }
    if params.tls.as_ref().is_some_and(|tls| tls.endpoint() != TlsEndpoint::Server) {
        return Err(SettingsError::WrongCredentials { needed: TlsEndpoint::Server });
    }
    Ok(())
}

/// A handle that does not keep the migration alive.
#[derive(Clone)]
pub struct WeakIncoming(Weak<Guard>);

impl WeakIncoming {
    /// The migration, if another handle still exists.
    pub fn upgrade(&self) -> Option<Incoming> {
        self.0.upgrade().map(|guard| Incoming { guard })
    }
}

/// Ends the threads when the last handle is dropped.
struct Guard {
    shared: Arc<Shared>,
    /// The listener thread, which owns the socket.
    listening: Option<JoinHandle<()>>,
    /// The additional address where a source that lost its connection may reconnect.
    recovery: Listening,
}

impl Guard {
    /// The state of the migration itself. After [`Incoming::listen_with`], another than before the VM was made.
    fn now(&self) -> &Arc<Shared> {
        self.shared.current()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.close();
        self.recovery.end();
        // An observer may drop the last handle on the listener thread itself. That thread cannot join itself,
        // and ends alone.
        let listening = self.listening.take().filter(|thread| thread.thread().id() != current().id());
        // An error of the join is ignored: a panic in the thread was already reported.
        let _ = listening.map(JoinHandle::join);
    }
}
