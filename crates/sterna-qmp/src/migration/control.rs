//! One VM's migrations: what operators have set, what runs, and which command is refused when.

mod postcopy;
mod protecting;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use sterna::ram::Custody;
use sterna::ram::missing_pages::MissingPages;
use sterna::throttle::Throttle;
use sterna::{Address, Parameters, RunState, SourceVm, StartError, Status, TargetVm, TlsEndpoint};

use super::announcing::Announcing;
use super::capabilities::CapabilitySet;
use super::colo;
use super::custody::{NO_GUEST, NOT_STARTED, ONE_CHANNEL, cannot_leave, not_free};
use super::dirty_limit;
use super::dirty_rate::{self, Measuring, Order};
use super::engine::{Engine, GuestAt, Outgoing, Receiving};
use super::objects::Objects;
use super::parameters::ParameterSet;
use super::query;
use super::real::SternaEngine;
use super::refusal::refused;
use super::relay::Relay;
use super::vm::MonitoredVm;
use crate::error::QmpError;
use crate::server::EventBus;

/// Parameters, capabilities and migrations of one VM; executes the monitor's commands.
pub struct MigrationControl {
    pub(super) vm: Arc<dyn MonitoredVm>,
    engine: Arc<dyn Engine>,
    relay: Arc<Relay>,
    state: Mutex<ControlState>,
}

/// The migration away from here and the one to here.
type Handles = (Option<Arc<dyn Outgoing>>, Option<Arc<dyn Receiving>>);

struct ControlState {
    parameters: ParameterSet,
    objects: Objects,
    capabilities: CapabilitySet,
    outgoing: Option<Arc<dyn Outgoing>>,
    incoming: Option<Arc<dyn Receiving>>,
    /// The last measurement of the dirty rate.
    measuring: Option<Measuring>,
    /// Whether a guest that comes starts by itself: true unless the VMM was started with `-S`, or `stop` was
    /// the operator's last word.
    autostart: bool,
    /// The VM has waited for its guest.
    began_without_guest: bool,
    /// The VM was started with `-S` and nobody has said `cont` yet.
    prelaunch: bool,
    /// Of the last protection from here; 0 before the first.
    generation: u64,
}

impl MigrationControl {
    /// The monitor of `vm`. Events go to `bus`, which its servers share. `autostart` is false if the VMM was
    /// told to leave its guest stopped (`-S`).
    pub fn new(vm: Arc<dyn MonitoredVm>, bus: EventBus, autostart: bool) -> Arc<Self> {
        Self::with_engine(vm, Arc::new(SternaEngine), bus, autostart)
    }

    /// As [`MigrationControl::new`], over another engine.
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
        };
        let relay = Arc::new(Relay { bus, ..Relay::default() });
        Arc::new(Self { vm, engine, relay, state: Mutex::new(state) })
    }

    /// The migration away from here, if one was ever started.
    pub fn outgoing(&self) -> Option<Arc<dyn Outgoing>> {
        self.state.lock().outgoing.clone()
    }

    /// The migration to here, if one was ever waited for.
    pub fn incoming(&self) -> Option<Arc<dyn Receiving>> {
        self.state.lock().incoming.clone()
    }

    /// `migrate`: starts moving the guest to `to`.
    ///
    /// # Errors
    /// While one runs, after one has completed, without a guest.
    pub fn migrate(&self, to: &Address) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        state.may_migrate(self.vm.has_guest(), self.custody(), to)?;
        if state.capabilities.get("x-colo") {
            return self.protect(&mut state, to);
        }
        let vm: Arc<dyn SourceVm> = self.vm.clone();
        let parameters = state.engine_parameters(to, TlsEndpoint::Client)?;
        let capabilities = state.capabilities.to_engine(true);
        let start = || {
            let (vm, observer) = (vm.clone(), self.relay.clone());
            self.engine.start_outgoing(vm, to, parameters.clone(), capabilities, observer)
        };
        let mut started = start();
        // The dirty log has one owner. Where nothing else is in the way, a measurement gives way.
        if matches!(started, Err(StartError::Tracked))
            && let Some(measuring) = &state.measuring
        {
            measuring.finish();
            started = start();
        }
        state.outgoing = Some(started.map_err(refused)?);
        Ok(())
    }

    /// A command of COLO, if it is one.
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

    /// `calc-dirty-rate`: begins to measure how fast the guest dirties its memory.
    pub(super) fn calc_dirty_rate(&self, order: Order) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        let refusal = if state.is_measuring() {
            "the dirty rate is already being measured."
        } else if state.is_migrating() {
            "A migration tracks the guest's writes: 'query-migrate' shows its dirty-pages-rate"
        } else if !self.vm.has_guest() {
            "Guest is waiting for an incoming migration; it does not run here"
        } else {
            state.measuring = Some(order.start(self.vm.clone())?);
            return Ok(());
        };
        Err(QmpError::generic(refusal))
    }

    /// What limits vCPUs' dirty rates, if anything does.
    fn limiter(&self) -> Option<&dyn Throttle> {
        dirty_limit::limiter(self.vm.throttle())
    }

    /// `set-vcpu-dirty-limit` and, without a `dirty-rate`, `cancel-vcpu-dirty-limit`.
    pub(super) fn limit_dirty_rate(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let state = self.state.lock();
        if state.is_migrating() && state.capabilities.get("dirty-limit") {
            return Err(QmpError::generic(
                "The running migration limits dirty rates itself; set its 'vcpu-dirty-limit'",
            ));
        }
        match arguments.contains_key("dirty-rate") {
            true => dirty_limit::set(self.vm.throttle(), arguments),
            false => dirty_limit::cancel(self.vm.throttle(), arguments),
        }
    }

    /// `query-vcpu-dirty-limit`.
    pub(super) fn query_dirty_limits(&self) -> Value {
        dirty_limit::query(self.vm.throttle())
    }

    /// `query-dirty-rate`: the last measurement.
    pub(super) fn query_dirty_rate(&self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        dirty_rate::query(self.state.lock().measuring.as_ref(), arguments)
    }

    /// `migrate-incoming`: waits for a guest at `at`; bound when it returns.
    ///
    /// # Errors
    /// While one is waited for, and in a VM that has a guest.
    pub fn listen(&self, at: &Address) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        state.may_listen(self.vm.has_guest())?;
        let vm: Arc<dyn TargetVm> = self.vm.clone();
        let parameters = state.engine_parameters(at, TlsEndpoint::Server)?;
        let capabilities = state.capabilities.to_engine(state.autostart);
        self.relay.start_when_held.store(false, Ordering::SeqCst);
        // What listened before has ended; let go of its address first.
        state.incoming = None;
        let before = self.relay.incoming.lock().take();
        drop(before);
        if state.capabilities.get("x-colo") {
            return self.stand_by(&mut state, at);
        }
        let incoming = self.engine.start_incoming(vm, at, parameters, capabilities, self.relay.clone());
        let incoming = incoming.map_err(refused)?;
        // In time: nothing is loaded within the moment since it was bound.
        let _ = incoming.set_autostart(state.autostart);
        *self.relay.incoming.lock() = Some(incoming.clone());
        state.incoming = Some(incoming);
        Ok(())
    }

    /// `migrate_cancel`, for either side. With `force` a destination discards even a guest that it holds. Where
    /// nothing runs there is nothing to do.
    ///
    /// # Errors
    /// After the commit, until the end; without `force`, while a guest is held here, of which this may be the
    /// only copy.
    pub fn cancel(&self, force: bool) -> Result<(), QmpError> {
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

    /// `migrate-continue`: goes on from the pause before the switchover.
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

    /// `x-sterna-decide`: says where the guest is when the acknowledgement was lost.
    pub fn decide(&self, guest_at: GuestAt) -> Result<(), QmpError> {
        let (outgoing, incoming) = self.handles();
        let protection = outgoing.as_ref().and_then(|outgoing| outgoing.protection());
        let protection = protection.or_else(|| incoming.as_ref().and_then(|incoming| incoming.protection()));
        if let Some(protection) = protection.filter(|protection| protection.mode().is_some()) {
            return protection.decide(guest_at == GuestAt::Source).map_err(QmpError::generic);
        }
        let is_open = |status| matches!(status, Status::Undecided | Status::PostcopyPaused);
        let outgoing = self.outgoing().filter(|outgoing| is_open(outgoing.status()));
        let outgoing = outgoing.ok_or_else(|| {
            QmpError::generic("No migration is undecided; 'query-migrate' shows the state of the last one")
        })?;
        outgoing.decide(guest_at).map_err(QmpError::generic)
    }

    /// `migrate-set-parameters`.
    pub fn set_parameters(&self, changes: &Map<String, Value>) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        let busy = state.is_busy();
        state.parameters.set(changes, busy)?;
        self.vm.set_announcing(Announcing::of_parameters(&state.parameters));
        if let Some(outgoing) = state.outgoing.as_ref().filter(|outgoing| !outgoing.status().is_terminal()) {
            outgoing.set_live(&state.parameters.to_engine());
            if let Some(protection) = outgoing.protection() {
                protection.set_mode(state.parameters.checkpoint_mode());
                protection.set_copy(state.parameters.checkpoint_copy());
                protection.set_in_flight(state.parameters.checkpoints_in_flight());
                // Given again, even unchanged, it asks for a checkpoint, as in QEMU.
                if changes.contains_key("x-checkpoint-delay") {
                    protection.set_delay(state.parameters.checkpoint_delay());
                }
            }
        }
        Ok(())
    }

    /// `object-add`: TLS credentials, or who is allowed to come.
    ///
    /// # Errors
    /// A kind, property or id that does not do, and files that cannot be used.
    pub fn add_object(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        self.state.lock().objects.add(arguments)
    }

    /// Every object's id and kind.
    pub(super) fn objects(&self) -> Vec<(String, &'static str)> {
        self.state.lock().objects.list()
    }

    /// `object-del`.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn delete_object(&self, id: &str) -> Result<(), QmpError> {
        self.state.lock().objects.delete(id)
    }

    /// `migrate-set-capabilities`: pairs of a name and its new state.
    pub fn set_capabilities(&self, changes: &[(String, bool)]) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        let next = state.capabilities.with(changes)?;
        if next.get("dirty-limit") && self.limiter().is_none() {
            return Err(QmpError::generic(
                "dirty-limit requires KVM with accelerator property 'dirty-ring-size' set: start the VM with a dirty \
                 ring, or use auto-converge",
            ));
        }
        // Before anything is given away: at the source it costs nothing, and another host may take the guest.
        if next.get("postcopy-ram") && !self.vm.has_guest() {
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

    /// What operators have set.
    pub fn parameters(&self) -> ParameterSet {
        self.state.lock().parameters.clone()
    }

    /// What operators have switched on.
    pub fn capabilities(&self) -> CapabilitySet {
        self.state.lock().capabilities.clone()
    }

    /// `query-migrate`: the last migration away from here, else the one to here, else nothing.
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

    /// `x-sterna-migration-statistics`: everything the engine knows, as its types serialise.
    pub fn statistics(&self) -> Value {
        let (outgoing, incoming) = self.handles();
        json!({
            "outgoing": outgoing.map(|outgoing| outgoing.statistics()),
            "incoming": incoming.map(|incoming| incoming.statistics()),
        })
    }

    /// `x-sterna-migration-recording`: what the precopy policy of the last migration away from here was told.
    pub fn recording(&self) -> Value {
        json!(self.handles().0.and_then(|outgoing| outgoing.recording()))
    }

    /// `query-status`'s word for what the VM does.
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

    /// `stop`. A guest that is still on its way will be paused when it has come.
    pub fn stop(&self) -> Result<(), QmpError> {
        if !self.vm.has_guest() {
            self.relay.start_when_held.store(false, Ordering::SeqCst);
            return self.start_on_arrival(false);
        }
        if self.custody() == Custody::Saved {
            return Ok(());
        }
        self.while_guest_is_free(|_| {
            let ran = self.vm.run_state() == RunState::Running;
            self.vm.pause().map_err(|error| QmpError::generic(error.to_string()))?;
            if ran {
                self.relay.bus.emit("STOP", None);
            }
            Ok(())
        })
    }

    /// `cont`. While the guest is still on its way, it will run when it has come.
    pub fn cont(&self) -> Result<(), QmpError> {
        let incoming = self.incoming();
        // In this order: a guest that becomes held meanwhile is released by one of the two.
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
                self.relay.bus.emit("RESUME", None);
                return Ok(());
            }
            _ => {}
        }
        self.while_guest_is_free(|state| {
            let ran = self.vm.run_state() == RunState::Running;
            self.vm.cont().map_err(|error| QmpError::generic(error.to_string()))?;
            state.prelaunch = false;
            if !ran {
                self.relay.bus.emit("RESUME", None);
            }
            Ok(())
        })
    }

    /// `quit`, apart from asking the VMM to go: that is for after the answer.
    pub(super) fn announce_shutdown(&self) {
        self.relay.bus.emit("SHUTDOWN", Some(json!({"guest": false, "reason": "host-qmp-quit"})));
    }

    /// `stop` and `cont` of a guest that is still on its way.
    fn start_on_arrival(&self, on: bool) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        state.autostart = on;
        let coming = state.incoming.as_ref().filter(|incoming| incoming.is_waiting());
        // A held guest starts by `cont` alone.
        if coming.is_none_or(|it| it.status() == Status::Held || it.set_autostart(on)) {
            return Ok(());
        }
        Err(QmpError::generic(
            "The guest is being handed over at this moment; send the command again when 'query-migrate' shows \
             'completed'",
        ))
    }

    /// Runs `act` wholly before or wholly after a migration's switchover; refuses it during and behind one.
    fn while_guest_is_free(
        &self,
        act: impl FnOnce(&mut ControlState) -> Result<(), QmpError>,
    ) -> Result<(), QmpError> {
        let mut state = self.state.lock();
        let done = self.vm.ram().while_free(|| act(&mut state));
        done.unwrap_or_else(|custody| Err(not_free(custody, state.outgoing.as_deref())))
    }

    /// The same for what changes nothing here.
    pub(super) fn with_free_guest(
        &self,
        act: impl FnOnce(&dyn MonitoredVm) -> Result<(), QmpError>,
    ) -> Result<(), QmpError> {
        self.while_guest_is_free(|_| act(&*self.vm))
    }

    /// Who has the guest, as the engine knows.
    fn custody(&self) -> Custody {
        self.vm.ram().custody()
    }

    fn handles(&self) -> Handles {
        let state = self.state.lock();
        (state.outgoing.clone(), state.incoming.clone())
    }
}

impl ControlState {
    /// The parameters of a migration over `address`, with the objects that they name.
    fn engine_parameters(&self, address: &Address, endpoint: TlsEndpoint) -> Result<Parameters, QmpError> {
        let tls = self.objects.tls(&self.parameters, endpoint)?;
        if tls.is_some() && matches!(address, Address::File { .. }) {
            return Err(QmpError::generic(
                "TLS needs a peer, which a file is not: unset 'tls-creds' for 'file:'",
            ));
        }
        Ok(Parameters { tls, ..self.parameters.to_engine() })
    }

    fn is_migrating(&self) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.status().is_terminal())
    }

    fn is_measuring(&self) -> bool {
        self.measuring.as_ref().is_some_and(Measuring::is_running)
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

    /// What the engine would refuse is said in QMP's words.
    fn may_migrate(&self, has_guest: bool, custody: Custody, to: &Address) -> Result<(), QmpError> {
        let refusal = if !has_guest {
            NO_GUEST
        } else if let Some(refusal) = cannot_leave(custody) {
            refusal
        } else if self.is_listening() {
            NOT_STARTED
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
