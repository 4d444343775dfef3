//! Which side has the guest at the end: settings, lost acknowledgements, cancels, and faults at any event, without
//! lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sterna::{
    Address, Arrival, Capabilities, ChunkSize, Decision, Event, Incoming, Migration, Observer, Outcome,
    Parameters, SourceVm, Status, StatusQuestions, TargetVm,
};
use sterna_transport::rdma::double::{Host, Network, Settings};

use crate::common;
use crate::support::{Handle, TestVm, assert_reset, eventually, until_status, vm, vms};

/// Two hosts, and a guest that runs at the first.
struct Lab {
    network: Network,
    hosts: [Host; 2],
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    params: [Parameters; 2],
    capabilities: Capabilities,
}

impl Lab {
    fn new(settings: Settings) -> Self {
        common::trace();
        let network = Network::new(settings).unwrap();
        let hosts = [network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()])];
        let params = hosts.clone().map(|host| {
            let mut params = common::parameters();
            params.rdma.fabric = Some(Arc::new(host));
            params
        });
        let (source, target) = vms();
        Self { network, hosts, source, target, params, capabilities: Capabilities::default() }
    }

    fn listen(&self, observer: Arc<dyn Observer>) -> Incoming {
        let vm: Arc<dyn TargetVm> = self.target.clone();
        let at: Address = "rdma:10.0.0.2:0".parse().unwrap();
        Incoming::listen(vm, &at, self.params[1].clone(), self.capabilities, observer).unwrap()
    }

    fn start(&self, incoming: &Incoming, observer: Arc<dyn Observer>) -> Migration {
        let Address::Rdma { port, .. } = incoming.address() else { panic!("{}", incoming.address()) };
        let to = Address::Rdma { host: "10.0.0.2".to_owned(), port };
        let vm: Arc<dyn SourceVm> = self.source.clone();
        Migration::start(vm, &to, self.params[0].clone(), self.capabilities, observer).unwrap()
    }

    /// Asserts that the guest moves, and that no resource is left.
    fn assert_moves(self) {
        let incoming = self.listen(Arc::new(()));
        let migration = self.start(&incoming, Arc::new(()));
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target.guest);
        drop((incoming, migration));
        self.assert_empty();
    }

    fn assert_empty(self) {
        let Self { network, source, target, params, .. } = self;
        drop((source, target, params));
        assert_eq!(network.counts().stale_registrations, 0);
        eventually(&format!("{:?} are left", network.leaks()), || network.leaks().is_empty());
    }
}

#[test]
fn guest_that_writes_moves_between_two_sternas() {
    for seed in 1..=3 {
        println!("seed {seed}");
        Lab::new(Settings::seeded(seed)).assert_moves();
    }
}

#[test]
fn guest_moves_with_any_settings_of_the_two_sides() {
    for (pin_all, return_path, here, there) in
        [(true, true, 1, 1), (false, false, 1, 4), (true, false, 8, 1), (false, true, 1024, 1)]
    {
        println!("pin-all {pin_all}, return path {return_path}, chunks of {here} and {there} MiB");
        let mut lab = Lab::new(Settings::new());
        lab.capabilities.rdma_pin_all = pin_all;
        lab.capabilities.return_path = return_path;
        lab.capabilities.unmanaged = true;
        for (params, mib) in lab.params.iter_mut().zip([here, there]) {
            params.rdma.chunk = ChunkSize::new(mib << 20).unwrap();
        }
        lab.assert_moves();
    }
}

/// Cuts the network when the guest runs at the destination, before the source receives the acknowledgement.
struct CutsAcknowledgement {
    network: Network,
    host: Host,
}

impl Observer for CutsAcknowledgement {
    fn event(&self, event: &Event) {
        if *event == Event::Resumed {
            self.network.set_link(&self.host, false);
        }
    }
}

/// A migration whose acknowledgement is lost. Returns when the source waits for it.
fn lose_acknowledgement(lab: &mut Lab) -> (Incoming, Migration, Arc<common::Log>) {
    lab.params[0].limits.acknowledge = Duration::from_millis(400);
    let cuts = CutsAcknowledgement { network: lab.network.clone(), host: lab.hosts[1].clone() };
    let incoming = lab.listen(Arc::new(cuts));
    let log = Arc::new(common::Log::default());
    let migration = lab.start(&incoming, log.clone());
    (incoming, migration, log)
}

#[test]
fn lost_acknowledgement_is_asked_for_over_a_new_connection() {
    let mut lab = Lab::new(Settings::new());
    let (incoming, migration, log) = lose_acknowledgement(&mut lab);
    until_status(&migration, Status::Undecided);
    lab.network.set_link(&lab.hosts[1], true);

    let outcome = migration.wait();

    common::assert_arrived(&outcome, &incoming.wait(), &lab.target.guest);
    assert!(log.events().contains(&Event::Status(Status::Undecided)), "{:?}", log.events());
    assert_eq!(*lab.source.resumes.lock().unwrap(), 0);
    drop((incoming, migration));
    lab.assert_empty();
}

#[test]
fn guest_that_could_not_start_is_asked_for_and_runs_on_at_the_source() {
    let mut lab = Lab::new(Settings::new());
    vm::order(&lab.target.fail_start, true);
    // The refusal is lost: the network is cut as soon as the source has committed.
    struct CutsAtCommit(CutsAcknowledgement);
    impl Observer for CutsAtCommit {
        fn event(&self, event: &Event) {
            if *event == Event::Committed {
                self.0.event(&Event::Resumed);
            }
        }
    }
    lab.params[0].limits.acknowledge = Duration::from_millis(400);
    let cuts = CutsAcknowledgement { network: lab.network.clone(), host: lab.hosts[1].clone() };
    let incoming = lab.listen(Arc::new(CutsAtCommit(cuts)));
    let migration = lab.start(&incoming, Arc::new(()));
    until_status(&migration, Status::Undecided);
    lab.network.set_link(&lab.hosts[1], true);

    let outcome = migration.wait();

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    common::assert_lives_on(&lab.source.guest);
    assert_reset(&lab.target);
    drop((incoming, migration));
    lab.assert_empty();
}

#[test]
fn destination_that_leaves_the_answer_to_an_operator_gives_none() {
    let mut lab = Lab::new(Settings::new());
    lab.params[1].status_questions = StatusQuestions::Operator;
    let (incoming, migration, _) = lose_acknowledgement(&mut lab);
    until_status(&migration, Status::Undecided);
    lab.network.set_link(&lab.hosts[1], true);
    std::thread::sleep(lab.params[0].limits.ask_interval * 4);
    assert_eq!(migration.status(), Status::Undecided);

    migration.decide(Decision::DestinationRuns).unwrap();

    common::assert_arrived(&migration.wait(), &incoming.wait(), &lab.target.guest);
    drop((incoming, migration));
    lab.assert_empty();
}

/// Runs a callback at the event with a given number.
struct At<F> {
    left: AtomicUsize,
    act: F,
}

impl<F: Fn() + Send + Sync> Observer for At<F> {
    fn event(&self, _: &Event) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            (self.act)();
        }
    }
}

fn at<F: Fn() + Send + Sync>(number: usize, act: F) -> Arc<At<F>> {
    Arc::new(At { left: AtomicUsize::new(number), act })
}

/// Asserts that one side has the guest, that the guest is complete there, and that no resource is left.
fn assert_one_has_it(lab: Lab, outcome: &Outcome, arrival: &Arrival) {
    match outcome {
        Outcome::Completed => common::assert_arrived(outcome, arrival, &lab.target.guest),
        Outcome::Cancelled | Outcome::Failed { held: false, .. } => {
            assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
            common::assert_lives_on(&lab.source.guest);
            assert_reset(&lab.target);
        }
        other => panic!("{other:?}, {arrival:?}"),
    }
    lab.assert_empty();
}

#[test]
fn cancel_at_any_event_of_the_source_leaves_one_guest_and_nothing_else() {
    let mut completed = 0;
    for number in 1..14 {
        println!("event {number}");
        let lab = Lab::new(Settings::new());
        let incoming = lab.listen(Arc::new(()));
        let handle = Arc::new(Handle::default());
        let cancels = {
            let handle = handle.clone();
            at(number, move || {
                let _ = handle.get().cancel();
            })
        };
        let migration = lab.start(&incoming, cancels);
        handle.set(&migration);
        let outcome = migration.wait();
        let arrival = crate::support::ended(&incoming);
        handle.clear();
        completed += usize::from(matches!(outcome, Outcome::Completed));
        drop((incoming, migration));
        assert_one_has_it(lab, &outcome, &arrival);
    }
    assert!(completed < 13, "nothing was ever cancelled");
}

#[test]
fn destination_given_up_at_any_event_leaves_one_guest_and_nothing_else() {
    for number in 1..9 {
        println!("event {number}");
        let lab = Lab::new(Settings::new());
        let place: Arc<std::sync::Mutex<Option<Incoming>>> = Arc::default();
        let cancels = {
            let place = place.clone();
            at(number, move || {
                let incoming = place.lock().unwrap().clone();
                if let Some(incoming) = incoming {
                    let _ = incoming.cancel();
                }
            })
        };
        let incoming = lab.listen(cancels);
        *place.lock().unwrap() = Some(incoming.clone());
        let migration = lab.start(&incoming, Arc::new(()));
        let outcome = migration.wait();
        let arrival = crate::support::ended(&incoming);
        *place.lock().unwrap() = None;
        drop((incoming, migration));
        assert_one_has_it(lab, &outcome, &arrival);
    }
}
