//! One case: a migration comes to its stop, suffers its blow, and is watched until both sides have settled.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::outgoing::Refusal;
use sterna::{Address, Arrival, Decision, Incoming, Migration, Outcome, SourceVm, Status, TargetVm};
use sterna_guests::ProcessGuest;

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

/// Longer than any wait of a case; what takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(25);

/// One side of the migration, here or in a process of its own that is to be killed.
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

/// Everything of a case that runs.
pub(crate) struct Play {
    pub case: Case,
    pub settings: Settings,
    pub ledger: Arc<Ledger>,
    pub source: Actor<Migration>,
    pub target: Actor<Incoming>,
    stage: Arc<Stage>,
    network: Network,
    /// Connections are cut and new ones impossible.
    down: bool,
    /// Connections of strangers to the destination; open until the case is over.
    strangers: Vec<TcpStream>,
}

/// Plays `case` and judges it; `program` is run for sides that are killed.
///
/// # Errors
/// What must not be.
pub fn run(case: Case, program: &Path) -> Result<(), String> {
    let before = Belongings::now();
    let played = Play::new(case, program).and_then(|mut play| {
        let done = play.disturb().and_then(|()| play.settle()).and_then(|()| judge::judge(&play));
        // Whatever came of it, nobody may stay at a stop.
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
            // As long as the source tries to take back what the destination never gives.
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

    /// Brings the migration to its stop and strikes.
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
                // The network is no callback of a VMM.
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

    /// Waits until both sides that live have settled. Undecided is not settled: it is resolved.
    fn settle(&mut self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
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
                    // Where the network is up, the destination may have answered since the look; the machine knows of it
                    // before the status says so.
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
            // No whole migration reached the destination: it still waits for one. A source that forked lives on in a
            // process of its own, and its migration comes.
            let comes = self.case.blow == Blow::ForkSource;
            if let (true, Some((_, incoming))) = (source_over && !comes, self.target.here())
                && incoming.status() == Status::Setup
            {
                let _ = incoming.cancel();
            }
            if Instant::now() > until {
                return Err("not settled".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends an undecided migration: the destination answers again, or an operator looks there and decides.
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
            // The destination's answer was quicker.
            Err(Refusal::NotUndecided { .. }) if !self.down => Ok(()),
            Err(refusal) => Err(format!("an operator's decision was refused: {refusal}")),
        }
    }

    fn reach(&self, stop: Stop) -> Result<(), String> {
        let reached = self.stage.wait_reached(PATIENCE);
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
            // A case that failed may leave one that never ends by itself.
            if migration.outcome().is_none() {
                let _ = migration.cancel();
                let _ = migration.decide(Decision::DestinationRuns);
            }
        }
    }
}

/// Whether the source's guest is back as it was.
pub(crate) fn is_back(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Cancelled | Outcome::Failed { held: false, .. })
}
