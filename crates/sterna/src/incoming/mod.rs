//! The destination: a guest arrives.
//!
//! A listener thread accepts connections for as long as the [`Incoming`] lives: first the migration's
//! channels, later the questions of a source whose acknowledgement was lost ([`accept`]). A control
//! thread performs what the handover machine asks for ([`control`]); a loader reads the main channel
//! ([`loader`]); one thread per multifd channel puts pages where the [`crate::pages::PageSink`] says
//! ([`lane`]), in step with the main channel's flushes ([`rounds`]).

mod accept;
mod acks;
mod arrival;
mod arriving;
mod autostart;
mod checkpoints;
mod comeback;
mod coming_memory;
mod control;
#[cfg(feature = "planted-faults")]
mod fault;
mod file;
pub(crate) mod follower;
mod greeting;
mod lane;
mod load_file;
mod loader;
mod memory;
mod places;
mod postcopy;
mod questions;
mod rdma;
mod reader;
mod rounds;
mod sections;
mod shared;
mod streams;
mod tail;
pub(crate) mod target;
pub(crate) mod vm_target;

use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, current};

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_ram::{Custody, CustodyClaim};
use sterna_transport::{Address, CancelFlag, Listener, TlsEndpoint};

pub use arrival::Arrival;
#[cfg(feature = "planted-faults")]
pub use fault::SharingFault;
pub use postcopy::listening::RecoverError;
pub use sterna_proto::destination::Refusal;

use crate::error::MigrationError;
use crate::events::{Observer, Status};
use crate::params::{Capabilities, Compression, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::stats::IncomingStatistics;
use crate::vm::TargetVm;
use load_file::LoadFile;
use postcopy::listening::Listening;
use rdma::state::Rdma;
use shared::Shared;
use target::Target;
use vm_target::VmTarget;

/// An incoming migration. Connections that do not fit this side are refused with a warning
/// ([`crate::Event::Warning`]); it fails only once all channels of a migration have come (specs/stream.md §3.1), and
/// waits for the next source until then.
///
/// Cloning gives another handle; when the last one is dropped, the address is
/// given up and a migration that is not committed fails. A guest that is held stays loaded in its VM.
///
/// The address can be listened at again as soon as that drop returns; it waits for the listener thread, so
/// do not hold a lock then that the observer takes.
///
/// Keep it after success: a source that lost the acknowledgement asks here what became of the guest.
#[derive(Clone)]
pub struct Incoming {
    guard: Arc<Guard>,
}

impl Incoming {
    /// Waits at `at` for a guest. The address is bound when this returns.
    ///
    /// # Errors
    /// [`StartError`] when the address cannot be bound or the settings make no sense, and [`StartError::Guest`] while
    /// another migration has to do with the VM's guest, or where one has brought a guest that is still here
    /// ([`Custody::Arrived`]). A guest that the VMM has put there itself is the VMM's responsibility.
    pub fn listen(
        vm: Arc<dyn TargetVm>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let target = VmTarget::new(vm).map_err(|error| StartError::System(error.to_string()))?;
        Self::listen_for(Arc::new(target), at, params, capabilities, observer)
    }

    /// As [`Incoming::listen`], for whatever takes the guest in.
    pub(crate) fn listen_for(
        target: Arc<dyn Target>,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        if capabilities.multifd && params.multifd_channels == 0 {
            return Err(SettingsError::NoChannels.into());
        }
        if params.tls.as_ref().is_some_and(|tls| tls.credentials.endpoint() != TlsEndpoint::Server) {
            return Err(SettingsError::WrongCredentials { needed: TlsEndpoint::Server }.into());
        }
        if matches!(at, Address::Rdma { .. }) {
            check_rdma(target.as_ref(), &params, &capabilities)?;
        }
        let (is_file, is_rdma) = (matches!(at, Address::File { .. }), matches!(at, Address::Rdma { .. }));
        postcopy::check(target.as_ref(), &capabilities, is_file, is_rdma)?;
        let file = LoadFile::open(at, &params, &capabilities)?;
        let custody = claim(target.as_ref())?;
        if let Some(file) = file {
            return Self::load((target, custody), at, file, params, capabilities, observer);
        }
        if let Address::Rdma { host, port } = at {
            let bound = rdma::listen::bind((host, *port), &params);
            let (listener, port) = bound.map_err(|error| StartError::System(error.to_string()))?;
            let address = Address::Rdma { host: host.clone(), port };
            let of_rdma = Arc::new(Rdma::new(&params, &capabilities));
            let mut shared = Shared::new((target, custody), address, params, capabilities, observer)
                .map_err(|error| StartError::System(error.to_string()))?;
            shared.rdma = Some(Arc::clone(&of_rdma));
            return Self::begin(shared, |shared| rdma::listen::spawn(shared, &of_rdma, listener));
        }
        let listener = Listener::bind(at).map_err(|error| StartError::System(error.to_string()))?;
        let address = listener.local_address();
        let shared = Shared::new((target, custody), address, params, capabilities, observer)
            .map_err(|error| StartError::System(error.to_string()))?;
        Self::begin(shared, |shared| accept::spawn(shared, listener))
    }

    /// Starts the threads. `listen` starts the one that accepts connections.
    fn begin(
        shared: Shared,
        listen: impl FnOnce(&Arc<Shared>) -> Result<JoinHandle<()>, MigrationError>,
    ) -> Result<Self, StartError> {
        // Before the threads: if only one of them starts, it ends that one.
        let mut guard = Guard { shared: Arc::new(shared), listening: None, recovery: Listening::default() };
        control::spawn(&guard.shared)
            .and_then(|()| listen(&guard.shared))
            .map(|thread| guard.listening = Some(thread))
            .map_err(|error| StartError::System(error.to_string()))?;
        Ok(Self { guard: Arc::new(guard) })
    }

    /// Takes a guest out of a file, at once. Without [`Capabilities::unmanaged`] it arrives paused: there is no source
    /// whose end somebody could wait for.
    fn load(
        (target, custody): (Arc<dyn Target>, Option<CustodyClaim>),
        at: &Address,
        file: LoadFile,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        if !target.is_in_memory() {
            return Err(SettingsError::ImageIntoFile.into());
        }
        let mut shared = Shared::new((target, custody), at.clone(), params, capabilities, observer)
            .map_err(|error| StartError::System(error.to_string()))?;
        shared.file = Some(file);
        let shared = Arc::new(shared);
        if !capabilities.unmanaged {
            let _ = shared.autostart.set(false);
        }
        let guard = Guard { shared, listening: None, recovery: Listening::default() };
        control::spawn(&guard.shared).map_err(|error| StartError::System(error.to_string()))?;
        file::begin(&guard.shared);
        Ok(Self { guard: Arc::new(guard) })
    }

    /// As [`Incoming::listen`], but takes pages that come twice in a round: for showing that memory is
    /// corrupt if a source violates the page order and this is off.
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

    /// As [`Incoming::listen`], with a destination that breaks the rules of memory that the source hands over: for showing that
    /// the source's guest would be damaged, and that tests find it.
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
        let mut target = VmTarget::new(vm).map_err(|error| StartError::System(error.to_string()))?;
        target.fault = Some(fault);
        Self::listen_for(Arc::new(target), at, params, capabilities, observer)
    }

    /// A handle for what the migration itself keeps alive.
    pub(crate) fn downgrade(&self) -> WeakIncoming {
        WeakIncoming(Arc::downgrade(&self.guard))
    }

    /// Where it listens, with the port that the kernel chose: at the address that [`Incoming::recover_at`] has named last, if it has.
    pub fn address(&self) -> Address {
        self.guard.recovery.address().unwrap_or_else(|| self.guard.shared.address.clone())
    }

    /// Listens at `at`, too, for the source of a guest that lacks pages (QMP's `migrate-recover`); what this has named before is given
    /// up. The first address stays: the source may come there as well.
    ///
    /// # Errors
    /// [`RecoverError`] unless the status is [`Status::PostcopyPaused`], and for an address that cannot be bound or where no source
    /// can come. Everything is as before then.
    pub fn recover_at(&self, at: &Address) -> Result<(), RecoverError> {
        let shared = &self.guard.shared;
        let state = shared.driver().map_or(State::Setup, |driver| driver.inspect(Destination::state));
        if state != State::PostcopyPaused {
            return Err(Refusal::NotPostcopyPaused { state }.into());
        }
        let has_two = shared.capabilities.postcopy_preempt;
        if matches!(at, Address::File { .. } | Address::Rdma { .. }) || at.is_descriptor() && has_two {
            return Err(SettingsError::NoWayToRecover.into());
        }
        if *at == shared.address || Some(at) == self.guard.recovery.address().as_ref() {
            return Ok(());
        }
        let system = |error: &dyn std::fmt::Display| RecoverError::System(error.to_string());
        let listener = Listener::bind(at).map_err(|error| system(&error))?;
        let (address, cancel) = (listener.local_address(), CancelFlag::new());
        let thread =
            accept::spawn_beside(shared, listener, cancel.clone()).map_err(|error| system(&error))?;
        self.guard.recovery.put(address, cancel, thread);
        Ok(())
    }

    /// Breaks the connection of a postcopy on purpose (QMP's `migrate-pause`): the guest runs on until it needs a page that did not
    /// come. A Sterna source does not connect again before its operator says so.
    ///
    /// # Errors
    /// [`Refusal`] unless the status is [`Status::PostcopyActive`] or [`Status::PostcopyRecover`].
    pub fn pause(&self) -> Result<(), Refusal> {
        let shared = &self.guard.shared;
        let state = shared.driver().map_or(State::Setup, |driver| driver.inspect(Destination::state));
        if !matches!(state, State::Postcopy | State::PostcopyRecover) {
            return Err(Refusal::NotPostcopyActive { state });
        }
        // Before the connection ends: what ends it is what the source is told.
        shared.postcopy.set_paused(true);
        shared.feed(Fed::PauseRequested).inspect_err(|_| shared.postcopy.set_paused(false))
    }

    /// Where it stands.
    pub fn status(&self) -> Status {
        self.guard.shared.status()
    }

    /// Its statistics now.
    pub fn statistics(&self) -> IncomingStatistics {
        self.guard.shared.statistics()
    }

    /// Gives it up.
    ///
    /// # Errors
    /// [`Refusal`] once the guest was handed over to this side. Also while it is held ([`Status::Held`]): this may be
    /// its only copy.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.guard.shared.abandon(false)
    }

    /// As [`Incoming::cancel`], and a guest that is held goes, too. Only for an operator who knows that the source has
    /// it and lets it run, or who does not want it any more: nobody can bring it back.
    ///
    /// # Errors
    /// [`Refusal`] once the guest was handed over to this side and started.
    pub fn discard(&self) -> Result<(), Refusal> {
        self.guard.shared.abandon(true)
    }

    /// Whether the guest starts when it has come, if it ran at the source; it does unless this was told
    /// otherwise. False starts no guest: it arrives paused, and starting it is the VMM's affair (QMP's `stop`,
    /// and `cont`, while the guest is on its way).
    ///
    /// Returns whether it will be so: too late once everything is loaded and the handover is under way.
    #[must_use = "it may be too late"]
    pub fn set_autostart(&self, on: bool) -> bool {
        self.guard.shared.autostart.set(on)
    }

    /// Starts a guest that is held until its QEMU source has completed ([`Status::Held`]).
    ///
    /// # Errors
    /// [`Refusal`] when no guest is held.
    pub fn release(&self) -> Result<(), Refusal> {
        self.guard.shared.feed(Fed::OperatorCont)
    }

    /// How it ended, if it has.
    pub fn arrival(&self) -> Option<Arrival> {
        self.guard.shared.arrival()
    }

    /// Waits for the end.
    pub fn wait(&self) -> Arrival {
        self.guard.shared.wait()
    }
}

/// What does not go with a destination at `rdma:`.
fn check_rdma(
    target: &dyn Target,
    params: &Parameters,
    capabilities: &Capabilities,
) -> Result<(), SettingsError> {
    if target.ram_sink().is_none() {
        return Err(SettingsError::ImageOverRdma);
    }
    if params.tls.is_some() {
        return Err(SettingsError::RdmaHasNoTls);
    }
    if capabilities.multifd && params.multifd_compression != Compression::None {
        return Err(SettingsError::RdmaIsUncompressed);
    }
    Ok(())
}

/// Claims the VM's guest, or the place for one.
fn claim(target: &dyn Target) -> Result<Option<CustodyClaim>, StartError> {
    let arriving = Custody::Arriving { is_free: false };
    let claim = target.guest().map(|ram| ram.claim_custody(arriving, Custody::may_arrive));
    claim.transpose().map_err(StartError::Guest)
}

/// A handle that does not keep the migration alive.
#[derive(Clone)]
pub(crate) struct WeakIncoming(Weak<Guard>);

impl WeakIncoming {
    /// The migration, if anybody else still has it.
    pub(crate) fn upgrade(&self) -> Option<Incoming> {
        self.0.upgrade().map(|guard| Incoming { guard })
    }
}

/// Ends the threads with the last handle.
struct Guard {
    shared: Arc<Shared>,
    /// The listener thread, which owns the socket.
    listening: Option<JoinHandle<()>>,
    /// Where else a source may come that was lost.
    recovery: Listening,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.close();
        self.recovery.end();
        // An observer may drop the last handle on that very thread, which then ends by itself.
        let listening = self.listening.take().filter(|thread| thread.thread().id() != current().id());
        // One that panicked has said so.
        let _ = listening.map(JoinHandle::join);
    }
}
