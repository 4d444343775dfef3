//! Devices with large state: their streams arrive complete, in order, in parallel and in bounded memory. After any
//! failure the state is complete at the source.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, multifd};
use crate::support;
use crate::support::bank::{Bank, Calls, HAS_READ};
use crate::support::vm::GUEST_STOPS;
use crate::support::{TestVm, assert_next_works, case, small, vm, vm_error};
use sterna::error::{Difference, MachineDifference, MigrationError};
use sterna::{Arrival, Capabilities, Outcome, Parameters};
use sterna_transport::rdma::double::{Network, Settings};

/// A VM with banks, and its destination.
struct Machines {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    saves: Calls,
    loads: Calls,
}

impl Machines {
    fn new(banks: impl Fn(&Calls) -> Vec<Bank>) -> Self {
        let (saves, loads) = (Calls::default(), Calls::default());
        let banks: Vec<_> = banks(&saves).into_iter().map(Arc::new).collect();
        let waiting = banks.iter().map(|bank| Arc::new(bank.waiting(&loads))).collect();
        let (source, target) = common::pair(&small());
        Self {
            source: TestVm::with_banks(source, banks),
            target: TestVm::with_banks(target, waiting),
            saves,
            loads,
        }
    }

    fn migrate(
        &self,
        params: &Parameters,
        capabilities: Capabilities,
    ) -> (sterna::Migration, Outcome, Arrival) {
        let incoming = vm::listen(&self.target, params, capabilities);
        let migration = vm::start(&self.source, &incoming.address(), params, capabilities, Arc::new(()));
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        // One chunk is always buffered. A source that does not know the limit uses larger chunks.
        let chunk = if capabilities.multifd { 65_556 } else { (1 << 20) + 20 };
        let held = params.max_queued_stream_bytes.max(chunk);
        for stream in incoming.statistics().streams {
            assert!(stream.peak_bytes <= held, "{stream:?}");
        }
        (migration, outcome, arrival)
    }

    /// Like [`Machines::migrate`], and returns the source's events.
    fn migrate_observed(
        &self,
        params: &Parameters,
        capabilities: Capabilities,
    ) -> (Outcome, Vec<sterna::Event>) {
        let log = Arc::new(common::Log::default());
        let incoming = vm::listen(&self.target, params, capabilities);
        let observer = Arc::clone(&log) as Arc<dyn sterna::Observer>;
        let migration = vm::start(&self.source, &incoming.address(), params, capabilities, observer);
        let outcome = migration.wait();
        incoming.wait();
        (outcome, log.events())
    }

    fn assert_arrived(&self, outcome: &Outcome, arrival: &Arrival) {
        common::assert_arrived(outcome, arrival, &self.target.guest);
        assert!(self.target.banks.iter().all(|bank| bank.runs()));
    }
}

fn banks(count: u32, bytes: u64, running_bytes: u64) -> impl Fn(&Calls) -> Vec<Bank> {
    move |calls| (0..count).map(|i| Bank::new(i, 77 + u64::from(i), bytes, running_bytes, calls)).collect()
}

fn read_while_running(banks: Vec<Bank>) -> Vec<Bank> {
    banks.into_iter().map(Bank::read_while_running).collect()
}

fn place(
    calls: &Calls,
    call: &str,
    which: impl Fn(&mut dyn Iterator<Item = usize>) -> Option<usize>,
) -> usize {
    let calls = calls.lock().unwrap();
    let mut places = calls.iter().enumerate().filter(|(_, made)| made.1 == call).map(|(place, _)| place);
    which(&mut places).unwrap_or_else(|| panic!("no {call} among {calls:?}"))
}

#[test]
fn streams_over_any_channels_arrive_whole() {
    case("streams", || {
        for lanes in [0, 1, 2, 5] {
            let (params, mut capabilities) = multifd(lanes.max(1));
            capabilities.multifd = lanes > 0;
            for running_bytes in [0, 700_001] {
                let banks = banks(3, 3_000_000, running_bytes);
                // Over the main channel alone, streams are not read before the guest stops.
                let machines = match lanes {
                    0 => Machines::new(banks),
                    _ => Machines::new(|calls| read_while_running(banks(calls))),
                };

                let (migration, outcome, arrival) = machines.migrate(&params, capabilities);

                machines.assert_arrived(&outcome, &arrival);
                for stream in migration.statistics().streams {
                    assert_eq!(stream.bytes, 3_000_000);
                    let running = if lanes > 0 { running_bytes } else { 0 };
                    assert_eq!(stream.running_bytes, running, "over {lanes} multifd channels");
                }
            }
        }
    });
}

#[test]
fn stream_of_no_bytes_and_of_one_arrive() {
    case("streams", || {
        for bytes in [0, 1] {
            let machines = Machines::new(banks(2, bytes, 0));
            let (params, capabilities) = multifd(2);
            let (_, outcome, arrival) = machines.migrate(&params, capabilities);
            machines.assert_arrived(&outcome, &arrival);
        }
    });
}

#[test]
fn devices_all_quiesce_before_any_stops_and_run_before_the_guest() {
    case("streams", || {
        let machines = Machines::new(banks(4, 1 << 20, 4096));
        let (params, capabilities) = multifd(2);

        let (_, outcome, arrival) = machines.migrate(&params, capabilities);

        machines.assert_arrived(&outcome, &arrival);
        let saves = &machines.saves;
        let last_quiesce = place(saves, "quiesce", |places| places.last());
        let first_stop = place(saves, "stop", |places| places.next());
        let last_stop = place(saves, "stop", |places| places.last());
        let first_rest = place(saves, "read stopped", |places| places.next());
        assert!(last_quiesce < first_stop && last_stop < first_rest, "{:?}", saves.lock().unwrap());
        assert_eq!(place(&machines.loads, "run", |places| Some(places.count())), 4);
    });
}

#[test]
fn guest_is_not_stopped_before_the_last_initial_chunk_was_read() {
    case("streams", || {
        let (params, capabilities) = multifd(2);
        // Chunks have half a MiB. Three of them are sent, and the last is the awaited one.
        let machines = Machines::new(|calls| read_while_running(banks(1, 3 << 20, 3 << 19)(calls)));
        *machines.source.banks[0].read_delay.lock().unwrap() = Duration::from_millis(200);

        let (_, outcome, arrival) = machines.migrate(&params, capabilities);

        machines.assert_arrived(&outcome, &arrival);
        let saves = &machines.saves;
        let guest_stops = place(saves, GUEST_STOPS, |places| places.next());
        let begun = place(saves, "read running", |places| places.last());
        let ended =
            begun + saves.lock().unwrap()[begun..].iter().position(|made| made.1 == HAS_READ).unwrap();
        assert!(ended < guest_stops, "{:?}", saves.lock().unwrap());
    });
}

#[test]
fn one_chunk_ceiling_with_stalled_loaders_never_blocks() {
    let mut random = sterna_testing::random("one_chunk_ceiling_with_stalled_loaders_never_blocks");
    case("streams", || (0..1000).for_each(|round| stalled_loader(&mut random, round, multifd(4))));
}

/// Each lane has its own queue pair, and receives are limited by credit. `cargo xtask soak` runs 1,000 rounds.
#[test]
fn one_chunk_ceiling_with_stalled_loaders_never_blocks_over_rdma() {
    let mut random = sterna_testing::random("one_chunk_ceiling_with_stalled_loaders_never_blocks_over_rdma");
    case("streams", || {
        for round in 0..sterna_testing::rounds(100) {
            let network = Network::new(Settings::seeded(random.u64(..))).unwrap();
            let host = network.host(&[[10, 0, 0, 1].into()]);
            let (mut params, capabilities) = multifd(4);
            params.rdma.fabric = Some(Arc::new(host.clone()));
            stalled_loader(&mut random, round, (params, capabilities));
            assert_eq!(network.counts().rnrs, 0);
            drop(host);
        }
    });
}

fn stalled_loader(random: &mut fastrand::Rng, round: u32, settings: (Parameters, Capabilities)) {
    let sizes: Vec<(u64, u64)> = (0..8).map(|_| (random.u64(..300_000), random.u64(..100_000))).collect();
    let machines = Machines::new(|calls| {
        let bank = |(index, (bytes, running)): (usize, &(u64, u64))| {
            Bank::new(index as u32, index as u64, *bytes, *running, calls)
        };
        sizes.iter().enumerate().map(bank).collect()
    });
    let stalled = random.u64(..8) as usize;
    let delay = Duration::from_micros(random.u64(..3000));
    *machines.target.banks[stalled].load_delay.lock().unwrap() = delay;
    let (mut params, capabilities) = settings;
    // The smallest limit: the destination buffers one chunk, or the configuration, at a time.
    params.max_queued_stream_bytes = 1;

    let (_, outcome, arrival) = machines.migrate(&params, capabilities);

    assert!(matches!(outcome, Outcome::Completed), "round {round}: {outcome:?}");
    assert!(matches!(arrival, Arrival::Completed(_)), "round {round}: {arrival:?}");
    assert!(machines.target.banks.iter().all(|bank| bank.runs()), "round {round}");
}

#[test]
fn stalled_loader_on_the_main_channel_alone_holds_no_more_than_the_ceiling() {
    case("streams", || {
        for ceiling in [1, 2 << 20] {
            let machines = Machines::new(banks(2, 4 << 20, 0));
            machines.target.banks.iter().for_each(|bank| {
                *bank.load_delay.lock().unwrap() = Duration::from_millis(5);
            });
            let (mut params, mut capabilities) = multifd(1);
            params.max_queued_stream_bytes = ceiling;
            capabilities.multifd = false;

            let (_, outcome, arrival) = machines.migrate(&params, capabilities);

            machines.assert_arrived(&outcome, &arrival);
        }
    });
}

#[test]
fn call_that_fails_leaves_the_guest_and_its_devices_running_at_the_source() {
    for lanes in [0, 2] {
        for call in
            ["begin_save", "remaining", "read running", "quiesce", "stop", "read stopped", "configuration"]
        {
            let never_made = lanes == 0 && call == "read running";
            if never_made {
                continue;
            }
            case("streams", || {
                let banks = banks(3, 600_000, 200_000);
                let machines = match call {
                    "read running" => Machines::new(|calls| read_while_running(banks(calls))),
                    _ => Machines::new(banks),
                };
                machines.source.banks[1].fail(Some(call));
                let (params, mut capabilities) = multifd(2);
                capabilities.multifd = lanes > 0;

                let (_, outcome, _) = machines.migrate(&params, capabilities);

                let Outcome::Failed { error, held: false } = &outcome else { panic!("{call}: {outcome:?}") };
                let why = vm_error(error);
                assert!(why.what.starts_with("device \"bank\", instance 1: "), "{call}: {why}");
                common::assert_lives_on(&machines.source.guest);
                assert!(machines.source.banks.iter().all(|bank| bank.runs()), "{call}");
                machines.source.banks[1].fail(None);
                assert_next_works(&machines.source, &machines.target);
            });
        }
    }
}

#[test]
fn load_that_fails_on_one_of_four_devices_names_it_and_the_source_runs_on() {
    for call in ["begin_load", "write", "finish_load"] {
        for lanes in [0, 2] {
            case("streams", || {
                let machines = Machines::new(banks(4, 600_000, 200_000));
                machines.target.banks[2].fail(Some(call));
                let (params, mut capabilities) = multifd(2);
                capabilities.multifd = lanes > 0;

                let (_, outcome, arrival) = machines.migrate(&params, capabilities);

                assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{call}: {outcome:?}");
                let Arrival::Failed(error) = &arrival else { panic!("{call}: {arrival:?}") };
                let why = vm_error(error);
                assert!(why.what.starts_with("device \"bank\", instance 2: "), "{call}: {why}");
                common::assert_lives_on(&machines.source.guest);
                assert!(machines.source.banks.iter().all(|bank| bank.runs()), "{call}");
                machines.target.banks[2].fail(None);
                assert_next_works(&machines.source, &machines.target);
            });
        }
    }
}

#[test]
fn device_that_died_does_not_hold_the_guest_at_the_source() {
    case("streams", || {
        let machines = Machines::new(banks(3, 600_000, 0));
        machines.source.banks[1].fail(Some("run"));
        machines.target.banks[2].fail(Some("finish_load"));
        let (params, capabilities) = multifd(2);

        let (outcome, events) = machines.migrate_observed(&params, capabilities);

        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&machines.source.guest);
        assert!(machines.source.banks[0].runs() && machines.source.banks[2].runs());
        assert!(support::has_warning(&events, &["\"bank\", instance 1: run"]), "{events:?}");
    });
}

#[test]
fn device_that_is_not_there_is_named() {
    case("streams", || {
        let (saves, loads) = (Calls::default(), Calls::default());
        let bank = Bank::new(0, 1, 100_000, 0, &saves);
        let other = Bank::new(5, 1, 100_000, 0, &loads);
        let (source, target) = common::pair(&small());
        let source = TestVm::with_banks(source, vec![Arc::new(bank)]);
        let target = TestVm::with_banks(target, vec![Arc::new(other.waiting(&loads))]);
        let (params, capabilities) = multifd(2);

        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let (outcome, arrival) = (migration.wait(), incoming.wait());

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        let MigrationError::PeerIncompatible(Difference::Machine(why)) = error else { panic!("{error}") };
        assert!(
            matches!(why, MachineDifference::StreamOnlyThere { device, instance: 5 } if device == "bank"),
            "{error}"
        );
        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
        common::assert_lives_on(&source.guest);
        // The failure was noticed while the guest ran.
        assert!(!saves.lock().unwrap().iter().any(|made| made.1 == "quiesce"));
    });
}

#[test]
fn device_that_the_destination_lacks_is_named_while_the_guest_runs() {
    case("streams", || {
        let (saves, loads) = (Calls::default(), Calls::default());
        let banks: Vec<_> = (0..2).map(|i| Arc::new(Bank::new(i, 1, 100_000, 0, &saves))).collect();
        let one = vec![Arc::new(banks[0].waiting(&loads))];
        let (source, target) = common::pair(&small());
        let (source, target) = (TestVm::with_banks(source, banks), TestVm::with_banks(target, one));
        let (params, capabilities) = multifd(2);

        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let (outcome, _) = (migration.wait(), incoming.wait());

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        let MigrationError::PeerIncompatible(Difference::Machine(why)) = error else { panic!("{error}") };
        assert!(
            matches!(why, MachineDifference::StreamOnlyHere { device, instance: 1 } if device == "bank"),
            "{error}"
        );
        assert!(!saves.lock().unwrap().iter().any(|made| made.1 == "quiesce"));
        common::assert_lives_on(&source.guest);
    });
}

#[test]
fn start_that_fails_at_the_destination_leaves_no_device_running_there() {
    case("streams", || {
        let machines = Machines::new(banks(4, 100_000, 0));
        machines.target.banks[3].fail(Some("run"));
        let (params, capabilities) = multifd(2);

        let (_, outcome, arrival) = machines.migrate(&params, capabilities);

        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        assert!(machines.target.banks.iter().all(|bank| !bank.runs()));
        let loads = &machines.loads;
        let last_run = place(loads, "run", |places| places.last());
        assert_eq!(place(loads, "stop", |places| Some(places.filter(|at| *at > last_run).count())), 4);
        common::assert_lives_on(&machines.source.guest);
        assert!(machines.source.banks.iter().all(|bank| bank.runs()));
        machines.target.banks[3].fail(None);
        assert_next_works(&machines.source, &machines.target);
    });
}

#[test]
fn only_copy_whose_device_is_dead_starts_without_it_when_it_is_told_again() {
    case("streams", || {
        let machines = Machines::new(banks(2, 100_000, 0));
        machines.target.banks[1].fail(Some("run"));
        let (params, mut capabilities) = multifd(2);
        // The source completes and discards the guest.
        capabilities.return_path = false;
        let incoming = vm::listen(&machines.target, &params, capabilities);
        let migration = vm::start(&machines.source, &incoming.address(), &params, capabilities, Arc::new(()));
        assert!(matches!(migration.wait(), Outcome::Completed));
        support::eventually("held", || incoming.status() == sterna::Status::Held);
        assert!(!machines.target.banks[0].runs(), "no device runs without its guest");

        incoming.release().unwrap();

        assert!(matches!(incoming.wait(), Arrival::Completed(sterna::RunState::Running)));
        common::assert_lives_on(&machines.target.guest);
        assert!(machines.target.banks[0].runs() && !machines.target.banks[1].runs());
    });
}

#[test]
fn device_that_cannot_be_stopped_costs_no_hook() {
    case("streams", || {
        let machines = Machines::new(banks(2, 100_000, 0));
        machines.source.banks[0].fail(Some("stop"));
        let (params, capabilities) = multifd(2);

        let (outcome, events) = machines.migrate_observed(&params, capabilities);

        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        let released = |event: &sterna::Event| {
            matches!(event, sterna::Event::SwitchoverStep { step: sterna::SwitchoverStep::ReleaseHooks, .. })
        };
        assert!(!events.iter().any(released), "{events:?}");
        common::assert_lives_on(&machines.source.guest);
    });
}

#[test]
fn switchover_ack_waits_for_every_devices_initial_bytes() {
    case("streams", || {
        let machines = Machines::new(|calls| {
            let bank = |instance| Bank::new(instance, 3, 2 << 20, 1 << 20, calls).asking();
            vec![bank(0), bank(1)]
        });
        *machines.target.banks[1].load_delay.lock().unwrap() = Duration::from_millis(50);
        let (mut params, mut capabilities) = multifd(2);
        params.max_queued_stream_bytes = 256 << 10;
        capabilities.switchover_ack = true;

        let (_, outcome, arrival) = machines.migrate(&params, capabilities);

        machines.assert_arrived(&outcome, &arrival);
        // All initial bytes were loaded before the devices were stopped, so the source read them before.
        let saves = machines.saves.lock().unwrap();
        let stop = saves.iter().position(|made| made.1 == "quiesce").unwrap();
        assert!(!saves[stop..].iter().any(|made| made.1 == "read running"), "{saves:?}");
        drop(saves);
        let first_acked = machines.loads.lock().unwrap().iter().filter(|made| made.1 == "write").count();
        assert!(first_acked >= 8, "{first_acked} chunks");
    });
}

#[test]
fn expected_pause_counts_the_slowest_device() {
    // Two seconds for one device, according to its estimate; half a second for the other.
    expected_pause(true, "Devices' state takes 2000 ms");
}

#[test]
fn expected_pause_counts_all_devices_where_they_follow_each_other() {
    expected_pause(false, "Devices' state takes 2500 ms");
}

fn expected_pause(multifd_on: bool, words: &str) {
    case("streams", || {
        let machines = Machines::new(banks(2, 1_000_000, 0));
        *machines.source.banks[0].expects.lock().unwrap() = Some(2_000_000);
        *machines.source.banks[1].expects.lock().unwrap() = Some(500_000);
        let (mut params, mut capabilities) = multifd(2);
        capabilities.multifd = multifd_on;
        params.downtime_limit = Duration::from_millis(300);
        params.non_convergence = sterna::NonConvergence::Fail;

        let (migration, outcome, _) = machines.migrate(&params, capabilities);

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        assert!(matches!(error, sterna::MigrationError::NotConverging { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
        let statistics = migration.statistics();
        assert!(statistics.expected_downtime >= Duration::from_secs(2));
        // Rounds over few pages do not reduce the devices' remaining bytes, so the rounds wait 20 ms each.
        let most = 20 + statistics.total_time.as_millis() as u64 / 10;
        assert!(statistics.rounds_begun < most, "{} rounds", statistics.rounds_begun);
        common::assert_lives_on(&machines.source.guest);
        params.downtime_limit = Duration::from_secs(3);
        let (_, outcome, arrival) = machines.migrate(&params, capabilities);
        machines.assert_arrived(&outcome, &arrival);
    });
}

#[test]
fn device_that_claims_to_have_all_bytes_there_are_is_never_taken_for_empty() {
    case("streams", || {
        let machines = Machines::new(banks(3, 100_000, 50_000));
        for (bank, claimed) in machines.source.banks.iter().zip([u64::MAX, u64::MAX, 1]) {
            *bank.claims.lock().unwrap() = Some(claimed);
            *bank.expects.lock().unwrap() = Some(1);
        }
        for stated in [0, 1] {
            let (mut params, capabilities) = multifd(2);
            params.avail_switchover_bandwidth_bytes = stated;
            params.non_convergence = sterna::NonConvergence::Fail;

            let (_, outcome, _) = machines.migrate(&params, capabilities);

            let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
            assert!(matches!(error, sterna::MigrationError::NotConverging { .. }), "{error}");
            common::assert_lives_on(&machines.source.guest);
        }
    });
}

#[test]
fn devices_of_a_paused_guest_are_saved_too() {
    case("streams", || {
        let machines = Machines::new(banks(2, 300_000, 0));
        machines.source.guest.pause().unwrap();
        let (params, capabilities) = multifd(2);

        let (_, outcome, arrival) = machines.migrate(&params, capabilities);

        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        assert!(matches!(arrival, Arrival::Completed(sterna::RunState::Paused)), "{arrival:?}");
        // Loading must not run the devices. The side that runs the guest does that.
        assert!(machines.target.banks.iter().all(|bank| !bank.runs()));
    });
}

#[test]
fn stream_through_a_file_of_any_form_arrives_whole() {
    through_files(&|calls| banks(2, 2_500_000, 1_000_000)(calls));
}

/// A stored guest stays stopped, so no downtime limit delays the stop. Its devices are read only after the stop.
#[test]
fn devices_that_take_longer_than_the_downtime_limit_are_saved_into_a_file() {
    through_files(&|calls| read_while_running(banks(2, 2_500_000, 1_000_000)(calls)));
}

fn through_files(banks: &dyn Fn(&Calls) -> Vec<Bank>) {
    case("streams", || {
        let directory = tempfile::tempdir().unwrap();
        for mapped_ram in [false, true] {
            let machines = Machines::new(banks);
            let path = directory.path().join(format!("image-{mapped_ram}"));
            let to = sterna::Address::File { path, offset: 0 };
            let (params, _) = multifd(2);
            let capabilities = Capabilities { mapped_ram, multifd: mapped_ram, ..Capabilities::default() };

            let migration = vm::start(&machines.source, &to, &params, capabilities, Arc::new(()));
            let waited = migration.wait_timeout(sterna_testing::stretched(Duration::from_secs(60)));
            let sterna::Waited::Ended(outcome) = waited else { panic!("{waited:?}") };
            assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
            let target = Arc::clone(&machines.target) as Arc<dyn sterna::TargetVm>;
            let incoming =
                sterna::Incoming::listen(target, &to, params.clone(), capabilities, Arc::new(())).unwrap();
            let arrival = incoming.wait();

            machines.assert_arrived(&outcome, &arrival);
        }
    });
}
