//! The migrations of one VM: settings, present state, and the rules when a command is refused.

mod completing;
mod dirty;
mod live_save;
mod operating;
mod postcopy;
mod protecting;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use sterna::ram::Custody;
use sterna::ram::engine_lock::EngineLock;
use sterna::ram::missing_pages::MissingPages;
use sterna::{Address, ChangeLog, Parameters, RunState, SourceVm, StartError, Status, TargetVm, TlsEndpoint};
use sterna_transport::CancelFlag;

use super::capabilities::CapabilitySet;
use super::colo;
use super::custody::{NO_GUEST, NOT_STARTED, ONE_CHANNEL, REACHING, cannot_leave, not_free};
use super::dirty_rate::Measuring;
use super::engine::{Engine, GuestAt, Outgoing, Receiving};
use super::events::{RESUME, SHUTDOWN};
use super::objects::Objects;
use super::parameters::{ParameterSet, Typed};
use super::query;
use super::real::SternaEngine;
use super::refusal::refused;
use super::relay::Relay;
use super::vm::{MonitoredVm, Vmm};
use crate::error::QmpError;
use crate::server::EventBus;

/// Parameters, capabilities and migrations of one VM. Executes the monitor's commands.
pub struct MigrationControl {
    pub(super) vm: Vmm,
    engine: Arc<dyn Engine>,
    relay: Arc<Relay>,
    /// Locked by every command that begins or sets something. So only one of them runs at a time. The engine and the
    /// VMM are called meanwhile. `stop`, `cont`, queries and postcopy commands do not lock it: a guest may wait for
    /// them.
    beginning: Mutex<()>,
    /// No callback of the VMM may run while this is locked.
    state: Arc<EngineLock<ControlState>>,
    /// Number of commands that operate the guest now, or wait for it: see `operating`.
    operating: Arc<AtomicU32>,
}

/// The migration away from this VM, and the migration to this VM.
type Handles = (Option<Arc<dyn Outgoing>>, Option<Arc<dyn Receiving>>);

struct ControlState {
    parameters: ParameterSet,
    objects: Objects,
    capabilities: CapabilitySet,
    outgoing: Option<Arc<dyn Outgoing>>,
    incoming: Option<Arc<dyn Receiving>>,
    /// The last measurement of the dirty rate.
    measuring: Option<Arc<Measuring>>,
    /// Whether an arriving guest starts by itself. True unless the VMM was started with `-S`, or the operator's last
    /// command was `stop`.
    autostart: bool,
    /// The VM had no guest when this control was created, so it waits for one, or has waited.
    began_without_guest: bool,
    /// The VM was started with `-S`, and no client has sent `cont` yet.
    prelaunch: bool,
    /// Generation of the last protection by which this VM was the primary. 0 before the first.
    generation: u64,
    /// While connecting to a standby: the flag that cancels it.
    reaching: Option<CancelFlag>,
    /// The pages that changed since earlier live saves.
    changes: Option<Arc<ChangeLog>>,
}

impl MigrationControl {
    /// The monitor of `vm`. Events are sent to `bus`, which its servers share. `autostart` is false if the VMM was
    /// started with `-S`, so that its guest stays stopped.
    pub fn new(vm: Arc<dyn MonitoredVm>, bus: EventBus, autostart: bool) -> Arc<Self> {
        Self::with_engine(vm, Arc::new(SternaEngine), bus, autostart)
    }

    /// Does the same as [`MigrationControl::new`] with another engine.
    pub fn with_engine(
        vm: Arc<dyn MonitoredVm>,
        engine: Arc<dyn Engine>,
        bus: EventBus,
        autostart: bool,
    ) -> Arc<Self> {
        let began_without_guest = !vm.has_guest();
        let state = ControlState {
            parameters: ParameterSet::default(),
            objects: Objects::default(),
            capabilities: CapabilitySet::default(),
            outgoing: None,
            incoming: None,
            measuring: None,
            autostart,
            began_without_guest,
            prelaunch: !autostart,
            generation: 0,
            reaching: None,
            changes: None,
        };
        let relay = Arc::new(Relay { bus, ..Relay::default() });
        let state = Arc::new(EngineLock::new("monitor state", state));
        let (beginning, operating) = (Mutex::default(), Arc::default());
        Arc::new(Self { vm: Vmm::new(vm), engine, relay, beginning, state, operating })
    }

    /// The last migration away from this VM, if there was one.
    pub fn outgoing(&self) -> Option<Arc<dyn Outgoing>> {
        self.state.lock().outgoing.clone()
    }

    /// The last migration to this VM, if there was one.
    pub fn incoming(&self) -> Option<Arc<dyn Receiving>> {
        self.state.lock().incoming.clone()
    }

    /// Executes `migrate`: starts moving the guest to `to`.
    ///
    /// # Errors
    /// A migration runs, or has completed, or the VM has no guest.
    pub fn migrate(&self, to: &Address) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let (has_guest, custody) = (self.vm.has_guest(), self.custody());
        let state = self.state.lock();
        state.may_migrate(has_guest, custody, to)?;
        let is_protection = state.capabilities.get("x-colo");
        let parameters = state.engine_parameters(to, TlsEndpoint::Client)?;
        let capabilities = state.capabilities.to_engine(true);
        let measuring = state.measuring.clone();
        drop(state);
        self.end_changes();
        if is_protection {
            return self.protect(to, (parameters, capabilities));
        }
        let vm: Arc<dyn SourceVm> = self.vm.shared();
        let start = || {
            let (vm, observer) = (vm.clone(), self.relay.clone());
            self.engine.start_outgoing(vm, to, parameters.clone(), capabilities, observer)
        };
        let mut started = start();
        // The dirty log has one owner. If only a measurement of the dirty rate blocks the migration, it is ended.
        if matches!(started, Err(StartError::Tracked))
            && let Some(measuring) = &measuring
        {
            measuring.finish();
            started = start();
        }
        let started = started.map_err(refused)?;
        self.state.lock().outgoing = Some(started);
        Ok(())
    }

    /// Executes a command of COLO. `None` if it is another command.
    pub(super) fn execute_protection(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
    ) -> Option<Result<Value, QmpError>> {
        let (outgoing, incoming) = self.handles();
        let last = outgoing.as_ref().and_then(|outgoing| outgoing.protection());
        let last = last.or_else(|| incoming.as_ref().and_then(|incoming| incoming.protection()));
        colo::execute(command, arguments, last)
    }

    /// Executes `migrate-incoming`: waits for a guest at `at`. The socket is bound when this returns.
    ///
    /// # Errors
    /// The VM waits for a guest already, or has one.
    pub fn listen(&self, at: &Address) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let has_guest = self.vm.has_guest();
        let mut state = self.state.lock();
        state.may_listen(has_guest)?;
        let is_protection = state.capabilities.get("x-colo");
        let parameters = state.engine_parameters(at, TlsEndpoint::Server)?;
        let capabilities = state.capabilities.to_engine(state.autostart);
        self.relay.start_when_held.store(false, Ordering::SeqCst);
        // The previous listener has ended. Drop it first, so that its address is free.
        let before = (state.incoming.take(), self.relay.incoming.lock().take());
        drop(state);
        drop(before);
        if is_protection {
            return self.stand_by(at, (parameters, capabilities));
        }
        let vm: Arc<dyn TargetVm> = self.vm.shared();
        let incoming = self.engine.start_incoming(vm, at, parameters, capabilities, self.relay.clone());
        let incoming = incoming.map_err(refused)?;
        *self.relay.incoming.lock() = Some(incoming.clone());
        let autostart = {
            let mut state = self.state.lock();
            state.incoming = Some(incoming.clone());
            state.autostart
        };
        // This is early enough: no guest is loaded in the short time since the socket was bound.
        let _ = incoming.set_autostart(autostart);
        Ok(())
    }

    /// Executes `migrate_cancel` on either side. With `force`, a destination discards even a guest that it holds.
    /// Succeeds without effect if no migration runs.
    ///
    /// # Errors
    /// The migration is committed and has not ended. Or a guest is held here, and `force` is not set: this may be its
    /// only copy.
    pub fn cancel(&self, force: bool) -> Result<(), QmpError> {
        if let Some(reaching) = &self.state.lock().reaching {
            reaching.cancel();
            return Ok(());
        }
        let (outgoing, incoming) = self.handles();
        if let Some(outgoing) = &outgoing {
            match outgoing.status() {
                Status::Cancelling => return Ok(()),
                status if !status.is_terminal() => return outgoing.cancel().map_err(QmpError::generic),
                _ => {}
            }
        }
        match incoming {
            Some(incoming) if incoming.is_waiting() => incoming.cancel(force).map_err(QmpError::generic),
            _ => Ok(()),
        }
    }

    /// Executes `migrate-continue`: continues after the pause before the switchover.
    pub fn continue_switchover(&self, state: &str) -> Result<(), QmpError> {
        if state != "pre-switchover" {
            return Err(QmpError::generic(format!(
                "Migration cannot continue from state '{state}'; only 'pre-switchover' waits for it"
            )));
        }
        let outgoing = self.outgoing().filter(|outgoing| outgoing.status() == Status::PreSwitchover);
        let outgoing = outgoing.ok_or_else(|| {
            QmpError::generic(
                "Migration not in expected state: it is not waiting in 'pre-switchover'; switch the capability \
                 'pause-before-switchover' on before 'migrate'",
            )
        })?;
        outgoing.continue_switchover().map_err(QmpError::generic)
    }

    /// Executes `x-sterna-decide`: the operator states which side has the guest after the acknowledgement was lost.
    ///
    /// In a paused postcopy, the operator gives up the pages that the destination lacks. `seen` is the status that the
    /// operator decided about, if known. The decision is refused in any other status.
    pub fn decide(&self, guest_at: GuestAt, seen: Option<Status>) -> Result<(), QmpError> {
        let (outgoing, incoming) = self.handles();
        let protection = outgoing.as_ref().and_then(|outgoing| outgoing.protection());
        let protection = protection.or_else(|| incoming.as_ref().and_then(|incoming| incoming.protection()));
        if let Some(protection) = protection.filter(|protection| protection.mode().is_some()) {
            if seen.is_some() {
                return Err(QmpError::generic(
                    "'expect' names the status of a migration, but a standby protects this guest: check the standby \
                     first, then decide without 'expect'",
                ));
            }
            return protection.decide(guest_at == GuestAt::Source).map_err(QmpError::generic);
        }
        let is_open =
            |status| matches!(status, Status::Undecided | Status::PostcopyPaused | Status::PostcopyRecover);
        let outgoing = self.outgoing().filter(|outgoing| is_open(outgoing.status()));
        let outgoing = outgoing.ok_or_else(|| {
            QmpError::generic("No migration is undecided; 'query-migrate' shows the state of the last one")
        })?;
        outgoing.decide(guest_at, seen).map_err(QmpError::generic)
    }

    /// Executes `migrate-set-parameters`.
    pub fn set_parameters(&self, changes: &Map<String, Value>) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let (parameters, outgoing) = {
            let mut state = self.state.lock();
            let busy = state.is_busy();
            state.parameters.set(changes, busy)?;
            (state.parameters.clone(), state.outgoing.clone())
        };
        let Typed { engine, announcing, checkpoints, .. } = parameters.typed();
        self.vm.set_announcing(announcing);
        if let Some(outgoing) = outgoing.filter(|outgoing| !outgoing.status().is_terminal()) {
            outgoing.set_live(&engine);
            if let Some(protection) = outgoing.protection() {
                protection.set_mode(checkpoints.mode());
                protection.set_copy(checkpoints.copy);
                protection.set_in_flight(checkpoints.in_flight);
                // Setting this parameter, even to the same value, requests a checkpoint, as in QEMU.
                if changes.contains_key("x-checkpoint-delay") {
                    protection.set_delay(checkpoints.delay);
                }
            }
        }
        Ok(())
    }

    /// Executes `object-add`: adds TLS credentials, or a list of identities that are allowed to connect.
    ///
    /// # Errors
    /// An invalid kind, property or id, or a file that cannot be used.
    pub fn add_object(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        self.state.lock().objects.add(arguments)
    }

    /// Id and kind of every object.
    pub(super) fn objects(&self) -> Vec<(String, &'static str)> {
        self.state.lock().objects.list()
    }

    /// Executes `object-del`.
    ///
    /// # Errors
    /// There is no object with this id.
    pub fn delete_object(&self, id: &str) -> Result<(), QmpError> {
        self.state.lock().objects.delete(id)
    }

    /// Executes `migrate-set-capabilities` with pairs of a name and its new state.
    pub fn set_capabilities(&self, changes: &[(String, bool)]) -> Result<(), QmpError> {
        let _one = self.beginning.lock();
        let (can_limit, has_guest) = (self.limiter().is_some(), self.vm.has_guest());
        let mut state = self.state.lock();
        let next = state.capabilities.with(changes)?;
        if next.get("dirty-limit") && !can_limit {
            return Err(QmpError::generic(
                "dirty-limit requires KVM with accelerator property 'dirty-ring-size' set: start the VM with a dirty \
                 ring, or use auto-converge",
            ));
        }
        // Checked before the source gives its guest away: a refusal costs nothing then, and another host may take the
        // guest.
        if next.get("postcopy-ram") && !has_guest {
            MissingPages::probe()
                .map_err(|error| QmpError::generic(format!("Postcopy is not supported: {error}")))?;
        }
        if !next.same_for_engine(&state.capabilities) {
            if state.is_migrating() {
                return Err(QmpError::generic(
                    "There's a migration process in progress; set capabilities before 'migrate'",
                ));
            }
            if state.is_listening() {
                return Err(QmpError::generic(
                    "This VM already waits for an incoming migration; start with '-incoming defer' and set \
                     capabilities before 'migrate-incoming', or 'migrate_cancel' first",
                ));
            }
        }
        self.relay.migration_events.store(next.get("events"), Ordering::Relaxed);
        state.capabilities = next;
        Ok(())
    }

    /// The operators' parameters.
    pub fn parameters(&self) -> ParameterSet {
        self.state.lock().parameters.clone()
    }

    /// The operators' capabilities.
    pub fn capabilities(&self) -> CapabilitySet {
        self.state.lock().capabilities.clone()
    }

    /// Answers `query-migrate` for the last migration away from this VM. Without one, the last migration to it, else
    /// an empty object.
    pub fn query(&self) -> Value {
        match self.handles() {
            (Some(outgoing), _) => {
                let Parameters { downtime_limit, reconnect_window, .. } = self.parameters().to_engine();
                query::outgoing(&outgoing.statistics(), downtime_limit, reconnect_window)
            }
            (None, Some(incoming)) => query::incoming(&*incoming),
            (None, None) => json!({}),
        }
    }

    /// Answers `x-sterna-migration-statistics`: all statistics of the engine, serialised from its types.
    pub fn statistics(&self) -> Value {
        let (outgoing, incoming) = self.handles();
        json!({
            "outgoing": outgoing.map(|outgoing| outgoing.statistics()),
            "incoming": incoming.map(|incoming| incoming.statistics()),
        })
    }

    /// Answers `x-sterna-migration-recording`: the inputs of the precopy policy in the last migration away from this
    /// VM.
    pub fn recording(&self) -> Value {
        json!(self.handles().0.and_then(|outgoing| outgoing.recording()))
    }

    /// The run state of the VM, under QEMU's name for `query-status`.
    pub fn run_state(&self) -> &'static str {
        let (outgoing, incoming) = self.handles();
        let custody = self.custody();
        let held = incoming.as_ref().is_some_and(|incoming| incoming.status() == Status::Held);
        if held {
            return "paused";
        }
        if !self.vm.has_guest() {
            return "inmigrate";
        }
        if self.vm.run_state() == RunState::Running {
            return "running";
        }
        if matches!(custody, Custody::Saved | Custody::Gone) {
            return "postmigrate";
        }
        match outgoing.map_or(Status::None, |outgoing| outgoing.status()) {
            Status::PreSwitchover
            | Status::Device
            | Status::PostcopyDevice
            | Status::PostcopyActive
            | Status::PostcopyPaused
            | Status::PostcopyRecover
            | Status::Undecided => "finish-migrate",
            _ if self.state.lock().is_prelaunch() => "prelaunch",
            _ => "paused",
        }
    }

    /// Executes `stop`. A guest that has not arrived yet will stay paused.
    pub fn stop(&self) -> Result<(), QmpError> {
        if !self.vm.has_guest() {
            self.relay.start_when_held.store(false, Ordering::SeqCst);
            return self.start_on_arrival(false);
        }
        if self.custody() == Custody::Saved {
            return Ok(());
        }
        self.pause_guest()
    }

    /// Executes `cont`. A guest that has not arrived yet will run after its arrival.
    pub fn cont(&self) -> Result<(), QmpError> {
        let incoming = self.incoming();
        // The flag is set first. So a guest that becomes held at this moment is released here or by the relay.
        self.relay.start_when_held.store(true, Ordering::SeqCst);
        if let Some(incoming) = incoming.filter(|incoming| incoming.status() == Status::Held) {
            let released = incoming.release();
            let runs_meanwhile = incoming.status() != Status::Held;
            return released.or_else(|why| if runs_meanwhile { Ok(()) } else { Err(QmpError::generic(why)) });
        }
        if !self.vm.has_guest() {
            return self.start_on_arrival(true);
        }
        match (self.custody(), self.outgoing()) {
            (Custody::Held, Some(outgoing)) => return outgoing.retry().map_err(QmpError::generic),
            (Custody::Saved, Some(outgoing)) => {
                outgoing.resume_saved().map_err(QmpError::generic)?;
                self.relay.bus.emit(&RESUME, None);
                return Ok(());
            }
            _ => {}
        }
        self.run_guest()
    }

    /// Announces the end of the VM for `quit`. The VMM is asked to end after the answer.
    pub(super) fn announce_shutdown(&self) {
        self.relay.bus.emit(&SHUTDOWN, Some(json!({"guest": false, "reason": "host-qmp-quit"})));
    }

    /// Executes `stop` and `cont` for a guest that has not arrived yet.
    fn start_on_arrival(&self, on: bool) -> Result<(), QmpError> {
        let incoming = self.state.lock().incoming.clone();
        let coming = incoming.filter(|incoming| incoming.is_waiting());
        // A held guest is started only by `cont`.
        if coming.is_none_or(|it| it.status() == Status::Held || it.set_autostart(on)) {
            // Stored only after success, because a refused command must not affect the next migration.
            self.state.lock().autostart = on;
            return Ok(());
        }
        Err(QmpError::generic(
            "The guest is being handed over at this moment; send the command again when 'query-migrate' shows \
             'completed'",
        ))
    }

    /// The guest's custody, as the engine knows it.
    fn custody(&self) -> Custody {
        self.vm.ram().custody()
    }

    fn handles(&self) -> Handles {
        let state = self.state.lock();
        (state.outgoing.clone(), state.incoming.clone())
    }
}

impl ControlState {
    /// The parameters of a migration over `address`, including the objects that they refer to.
    fn engine_parameters(&self, address: &Address, endpoint: TlsEndpoint) -> Result<Parameters, QmpError> {
        let Typed { engine, tls, .. } = self.parameters.typed();
        let tls = self.objects.tls(&tls, endpoint)?;
        if tls.is_some() && matches!(address, Address::File { .. }) {
            return Err(QmpError::generic(
                "TLS needs a peer, which a file is not: unset 'tls-creds' for 'file:'",
            ));
        }
        Ok(Parameters { tls, ..engine })
    }

    fn is_migrating(&self) -> bool {
        self.reaching.is_some()
            || self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.status().is_terminal())
    }

    fn is_measuring(&self) -> bool {
        self.measuring.as_ref().is_some_and(|measuring| measuring.is_running())
    }

    fn is_listening(&self) -> bool {
        self.incoming.as_deref().is_some_and(Receiving::is_waiting)
    }

    fn is_busy(&self) -> bool {
        self.is_migrating() || self.is_listening()
    }

    fn is_prelaunch(&self) -> bool {
        self.prelaunch && !self.began_without_guest
    }

    /// Checks whether a migration may start, so that the refusal has QMP's wording and not the engine's.
    fn may_migrate(&self, has_guest: bool, custody: Custody, to: &Address) -> Result<(), QmpError> {
        let refusal = if !has_guest {
            NO_GUEST
        } else if let Some(refusal) = cannot_leave(custody) {
            refusal
        } else if self.is_listening() {
            NOT_STARTED
        } else if self.reaching.is_some() {
            REACHING
        } else if to.is_descriptor() && self.capabilities.get("multifd") {
            ONE_CHANNEL
        } else {
            return Ok(());
        };
        Err(QmpError::generic(refusal))
    }

    fn may_listen(&self, has_guest: bool) -> Result<(), QmpError> {
        let refusal = if self.is_listening() {
            "The incoming migration has already been started; 'query-migrate' shows where it listens"
        } else if self.began_without_guest && has_guest {
            "A guest has already arrived; start another VM with '-incoming defer' for another guest"
        } else if has_guest {
            "'-incoming' was not specified on the command line; start a VM with '-incoming defer'"
        } else {
            return Ok(());
        };
        Err(QmpError::generic(refusal))
    }
}
