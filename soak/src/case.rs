//! One case: a migration reaches its stop, the blow is applied, and both sides are watched until they settle.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna::outgoing::Refusal;
use sterna::{Address, Arrival, Decision, Incoming, Migration, Outcome, SourceVm, Status, TargetVm};
use sterna_guests::ProcessGuest;
use sterna_testing::CoreTime;

use crate::bank::Bank;
use crate::child::Process;
use crate::judge;
use crate::leaks::Belongings;
use crate::ledger::Ledger;
use crate::network::Network;
use crate::schedule::{Blow, Case};
use crate::settings::Settings;
use crate::stage::Stage;
use crate::staged::Staged;
use crate::stop::{Prelude, Side, Stop};
use crate::strangers;

/// Limit of every wait of a case, in time of a quiet machine. A longer wait counts as a hang.
const PATIENCE: Duration = Duration::from_secs(25);

/// One side of the migration: in this process, or in a child process that is to be killed.
pub(crate) enum Actor<M> {
    Here { vm: Arc<Staged>, migration: M },
    Away(Process),
}

impl<M> Actor<M> {
    pub fn here(&self) -> Option<(&Arc<Staged>, &M)> {
        match self {
            Self::Here { vm, migration } => Some((vm, migration)),
            Self::Away(_) => None,
        }
    }
}

/// The running parts of a case.
pub(crate) struct Play {
    pub case: Case,
    pub settings: Settings,
    pub ledger: Arc<Ledger>,
    pub source: Actor<Migration>,
    pub target: Actor<Incoming>,
    stage: Arc<Stage>,
    network: Network,
    /// Connections are cut, and new ones fail.
    down: bool,
    /// Connections that belong to no migration. They stay open until the case is over.
    strangers: Vec<TcpStream>,
}

/// Plays `case` and judges it. `program` is run for sides that are killed.
///
/// # Errors
/// A description of the violated property.
pub fn run(case: Case, program: &Path) -> Result<(), String> {
    let before = Belongings::now();
    let played = Play::new(case, program).and_then(|mut play| {
        let done = play.disturb().and_then(|()| play.settle()).and_then(|()| judge::judge(&play));
        // Opens the stage also after an error, so that no thread keeps waiting at a stop.
        play.stage.open();
        done.map_err(|error| format!("{error}; {}", play.describe()))
    });
    played?;
    before.wait_restored(Duration::from_secs(5))
}

impl Play {
    fn new(case: Case, program: &Path) -> Result<Self, String> {
        let mut settings = Settings::new(case.seed, case.stop);
        if case.blow == Blow::Silence {
            settings = settings.impatient();
        }
        if case.blow == Blow::Panic && case.stop == Stop::GivingBack {
            // The source tries to get the lease back for this long, and the destination never releases it.
            settings.params.limits.prepare = Duration::from_secs(2);
        }
        let wanted = case.stop.prelude().map(|(before, _)| before).into_iter().chain([case.stop]);
        let stage = Arc::new(Stage::new(wanted));
        let ledger = match case.blow {
            Blow::KillSource | Blow::ForkSource => Ledger::default(),
            _ => Ledger::with_owner(Side::Source),
        };
        let ledger = Arc::new(ledger);

        let (target, address) = if case.blow == Blow::KillDestination {
            let (process, address) = Process::spawn(program, &case, Side::Destination, None, &stage)?;
            (Actor::Away(process), address.ok_or("the destination's process listens nowhere")?)
        } else {
            let guest = ProcessGuest::waiting(settings.guest.clone()).map_err(|error| error.to_string())?;
            let banks = Bank::all(&settings.banks, false)?;
            let vm = Staged::new(guest, banks, Arc::clone(&stage), Arc::clone(&ledger), Side::Destination);
            let incoming = listen(&vm, &settings)?;
            let address = incoming.address();
            (Actor::Here { vm, migration: incoming }, address)
        };
        let network = Network::new(address, Arc::clone(&stage)).map_err(|error| error.to_string())?;
        let source = if matches!(case.blow, Blow::KillSource | Blow::ForkSource) {
            let (process, _) =
                Process::spawn(program, &case, Side::Source, Some(&network.address()), &stage)?;
            Actor::Away(process)
        } else {
            let guest = ProcessGuest::boot(settings.guest.clone()).map_err(|error| error.to_string())?;
            guest.cont().map_err(|error| error.to_string())?;
            let banks = Bank::all(&settings.banks, true)?;
            let vm = Staged::new(guest, banks, Arc::clone(&stage), Arc::clone(&ledger), Side::Source);
            let migration = start(&vm, &network.address(), &settings)?;
            Actor::Here { vm, migration }
        };
        Ok(Self {
            case,
            settings,
            ledger,
            source,
            target,
            stage,
            network,
            down: false,
            strangers: Vec::new(),
        })
    }

    /// Waits until the migration reaches its stop, then applies the blow.
    fn disturb(&mut self) -> Result<(), String> {
        if let Some((stop, prelude)) = self.case.stop.prelude() {
            self.reach(stop)?;
            match prelude {
                Prelude::Cancel => match &self.source {
                    Actor::Here { migration, .. } => {
                        migration.cancel().map_err(|refusal| refusal.to_string())?
                    }
                    Actor::Away(process) => process.cancel(),
                },
                Prelude::Cut => self.cut(false),
                Prelude::Outage => self.cut(true),
            }
            self.release(stop);
        }
        self.reach(self.case.stop)?;
        self.strike()?;
        if let (Stop::LaterPass, Some((_, migration))) = (self.case.stop, self.source.here()) {
            migration
                .set_live(|params| params.downtime_limit = Duration::from_secs(1))
                .expect("a live setting");
        }
        self.release(self.case.stop);
        Ok(())
    }

    fn strike(&mut self) -> Result<(), String> {
        match (self.case.blow, &self.source, &self.target) {
            (Blow::Cancel, Actor::Here { migration, .. }, _) => {
                judge::cancelled(self.case.stop, migration.cancel())
            }
            (Blow::Abandon, _, Actor::Here { migration, .. }) => {
                judge::abandoned(self.case.stop, migration.cancel())
            }
            (Blow::Cut, ..) => {
                self.cut(self.down);
                Ok(())
            }
            (Blow::Outage, ..) => {
                self.cut(true);
                Ok(())
            }
            (Blow::Silence, ..) => {
                self.network.silence();
                Ok(())
            }
            (Blow::Strangers, ..) => {
                self.strangers = strangers::connect(self.network.destination(), self.case.seed)?;
                Ok(())
            }
            (Blow::ForkSource, ..) => Ok(()),
            (Blow::Panic, ..) => {
                // A stop of the network is in the proxy and not in a callback of the VMM, so it cannot panic.
                if self.case.stop.side() != Side::Network {
                    self.stage.panic(self.case.stop);
                }
                Ok(())
            }
            (Blow::KillSource, Actor::Away(process), _)
            | (Blow::KillDestination, _, Actor::Away(process)) => {
                process.kill();
                Ok(())
            }
            (blow, ..) => Err(format!("nobody is there for {blow:?}")),
        }
    }

    /// Waits until all living sides have settled. An undecided source is not settled: it is resolved.
    fn settle(&mut self) -> Result<(), String> {
        let mut time = CoreTime::default();
        let mut resolved = false;
        loop {
            let arrival = self.target.here().map(|(_, incoming)| incoming.arrival());
            let outcome = self.source.here().map(|(_, migration)| migration.outcome());
            let source_over = !matches!(outcome, Some(None));
            let target_over = !matches!(arrival, Some(None));
            if source_over && target_over {
                return Ok(());
            }
            if let Some((vm, migration)) = self.source.here() {
                if migration.status() == Status::PreSwitchover {
                    let _ = migration.continue_switchover();
                }
                if migration.status() == Status::Undecided && !resolved && target_over {
                    if migration.may_guest_run() || vm.run_state() != sterna::RunState::Paused {
                        return Err("the guest may run at an undecided source".into());
                    }
                    let answer = migration.cancel();
                    let is_refused = matches!(answer, Err(Refusal::CancelUndecided));
                    // If the network is up, the destination may have answered after the status was read. The
                    // state machine knows the answer before the status shows it.
                    let is_answered = !self.down && matches!(answer, Err(Refusal::NothingToCancel { .. }));
                    if !is_refused && !is_answered {
                        return Err(format!("cancel of an undecided migration was answered with {answer:?}"));
                    }
                    if is_refused {
                        self.resolve(arrival.flatten().as_ref())?;
                        resolved = true;
                    }
                }
            }
            // The destination still waits because no complete migration reached it. A forked source is the
            // exception: it continues in its child process, and its migration will arrive.
            let comes = self.case.blow == Blow::ForkSource;
            if let (true, Some((_, incoming))) = (source_over && !comes, self.target.here())
                && incoming.status() == Status::Setup
            {
                let _ = incoming.cancel();
            }
            if time.look() > PATIENCE {
                return Err("not settled".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends an undecided migration: the destination answers again, or an operator decides after a look at it.
    fn resolve(&mut self, arrival: Option<&Arrival>) -> Result<(), String> {
        let Some((_, migration)) = self.source.here() else { return Ok(()) };
        let is_there = matches!(arrival, Some(Arrival::Completed(_)));
        if self.target.here().is_some() && !self.settings.operator_decides {
            self.network.heal();
            return Ok(());
        }
        let decision = if is_there { Decision::DestinationRuns } else { Decision::SourceRuns };
        match migration.decide(decision) {
            Ok(()) => Ok(()),
            // The destination's answer arrived before the decision.
            Err(Refusal::NotUndecided { .. }) if !self.down => Ok(()),
            Err(refusal) => Err(format!("an operator's decision was refused: {refusal}")),
        }
    }

    fn reach(&self, stop: Stop) -> Result<(), String> {
        let mut time = CoreTime::default();
        let mut reached = false;
        while !reached && time.look() < PATIENCE {
            reached = self.stage.wait_reached(PATIENCE / 50);
        }
        if reached { Ok(()) } else { Err(format!("the migration never came to {}", stop.label())) }
    }

    fn release(&self, stop: Stop) {
        self.stage.release();
        match (stop.side(), &self.source, &self.target) {
            (Side::Source, Actor::Away(process), _) | (Side::Destination, _, Actor::Away(process)) => {
                process.release();
            }
            _ => {}
        }
    }

    fn cut(&mut self, down: bool) {
        self.down = down;
        self.network.cut(down);
    }

    fn describe(&self) -> String {
        let source = self.source.here().map(|(vm, migration)| {
            (migration.status(), migration.outcome(), vm.run_state(), migration.statistics().error)
        });
        let target = self.target.here().map(|(vm, incoming)| {
            (incoming.status(), incoming.arrival(), vm.guest.has_guest(), incoming.statistics().error)
        });
        format!("source {source:?}, destination {target:?}, lease {:?}", self.ledger.holder())
    }
}

pub(crate) fn listen(vm: &Arc<Staged>, settings: &Settings) -> Result<Incoming, String> {
    let any = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let (observer, vm) = (vm.observer(), Arc::clone(vm) as Arc<dyn TargetVm>);
    Incoming::listen(vm, &any, settings.params.clone(), settings.capabilities, observer)
        .map_err(|error| error.to_string())
}

pub(crate) fn start(vm: &Arc<Staged>, to: &Address, settings: &Settings) -> Result<Migration, String> {
    let (observer, vm) = (vm.observer(), Arc::clone(vm) as Arc<dyn SourceVm>);
    Migration::start(vm, to, settings.params.clone(), settings.capabilities, observer)
        .map_err(|error| error.to_string())
}

impl Drop for Play {
    fn drop(&mut self) {
        self.stage.open();
        if let Some((_, migration)) = self.source.here() {
            // After a failed case, a migration may remain that never ends by itself.
            if migration.outcome().is_none() {
                let _ = migration.cancel();
                let _ = migration.decide(Decision::DestinationRuns);
            }
        }
    }
}

/// Whether the guest at the source is in its state before the migration.
pub(crate) fn is_back(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Cancelled | Outcome::Failed { held: false, .. })
}
