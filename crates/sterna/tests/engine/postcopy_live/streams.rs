//! Device streams in postcopy: all of a stream arrives and is loaded before the guest runs.

use std::sync::Arc;
use std::time::Duration;

use sterna::error::{BadChunk, Misbehaviour};
use sterna::ram::Backing;
use sterna::{
    Arrival, Capabilities, Compression, Event, Incoming, Migration, MigrationError, NonConvergence, Outcome,
    Parameters, RunState, SourceVm, Status, WaitLimits,
};
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::peer::HandMadeSource;
use super::recovery::trickle;
use super::{capabilities, config, slow};
use crate::common::{self, Log};
use crate::support::bank::{Bank, Calls};
use crate::support::proxy::{Filter, Line, Proxy, Verdict, Way};
use crate::support::vm::GUEST_STOPS;
use crate::support::{TestVm, eventually, until_status, vm, vm_error};

/// Instance, seed, bytes, and the bytes that can be read while the device runs.
const BANKS: [(u32, u64, u64, u64); 2] = [(0, 7, 12 << 20, 8 << 20), (1, 8, 3 << 20, 0)];

/// A running guest with two such devices, and its destination.
struct Machines {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    /// Calls of the devices on each side.
    calls: [Calls; 2],
}

impl Machines {
    fn new() -> Self {
        Self::of(&config())
    }

    fn of(config: &ProcessConfig) -> Self {
        let calls = [Calls::default(), Calls::default()];
        let banks = BANKS.map(|(instance, seed, bytes, running)| {
            Arc::new(Bank::new(instance, seed, bytes, running, &calls[0]))
        });
        let waiting = banks.iter().map(|bank| Arc::new(bank.waiting(&calls[1]))).collect();
        let (source, target) = common::pair(config);
        let source = TestVm::with_banks(source, banks.to_vec());
        Self { source, target: TestVm::with_banks(target, waiting), calls }
    }

    /// Migrates between the two over a proxy, and switches to postcopy immediately.
    fn switch(&self, params: &Parameters, on: Capabilities) -> Switched {
        self.switch_over(params, on, Box::new(|_, _, _, _| Verdict::Pass))
    }

    fn switch_over(&self, params: &Parameters, on: Capabilities, filter: Filter) -> Switched {
        let incoming = vm::listen(&self.target, params, on);
        let proxy = Proxy::new(&incoming.address(), filter);
        let told = Arc::new(Log::default());
        let migration = vm::start(&self.source, &proxy.address(), params, on, told.clone());
        migration.start_postcopy().unwrap();
        Switched { incoming, migration, proxy, told }
    }

    /// Asserts that everything is at the destination, and that nothing runs at the source.
    fn assert_arrived(&self, switched: &Switched) {
        let (outcome, arrival) = (switched.migration.wait(), switched.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target.guest);
        assert!(switched.incoming.statistics().postcopy.is_some(), "it ran early");
        for (bank, (_, _, bytes, _)) in self.target.banks.iter().zip(BANKS) {
            assert!(bank.runs() && bank.position() == bytes, "{} of {bytes} bytes", bank.position());
        }
        assert!(self.source.banks.iter().all(|bank| !bank.runs()));
        let streams = switched.migration.statistics().streams;
        let bytes: Vec<_> = streams.iter().map(|stream| stream.bytes).collect();
        assert_eq!(bytes, BANKS.map(|(_, _, bytes, _)| bytes));
    }
}

struct Switched {
    incoming: Incoming,
    migration: Migration,
    proxy: Proxy,
    told: Arc<Log>,
}

/// Settings for the main channel alone, and for multifd channels.
fn ways(preempt: bool) -> Option<Vec<(Parameters, Capabilities)>> {
    let on = capabilities(preempt)?;
    let lanes = |count, multifd_compression| {
        let params = Parameters { multifd_channels: count, multifd_compression, ..slow() };
        (params, Capabilities { multifd: true, ..on })
    };
    Some(vec![
        (slow(), on),
        lanes(1, Compression::Zlib),
        lanes(2, Compression::Zstd),
        lanes(4, Compression::None),
    ])
}

#[test]
fn devices_state_comes_before_the_guest_runs_and_its_pages_follow() {
    for preempt in [false, true] {
        let Some(ways) = ways(preempt) else { return };
        for (params, on) in ways {
            let machines = Machines::new();
            machines.assert_arrived(&machines.switch(&params, on));

            let loads = machines.calls[1].lock().unwrap();
            let last_load = loads.iter().rposition(|(_, call)| *call == "finish_load").unwrap();
            let first_run = loads.iter().position(|(_, call)| *call == "run").unwrap();
            assert!(last_load < first_run, "{loads:?}");
        }
    }
}

#[test]
fn initial_bytes_are_read_while_the_guest_runs_however_early_the_switch_is_wanted() {
    let Some(on) = capabilities(true) else { return };
    let machines = Machines::new();
    // Reading the device takes longer than the switch.
    *machines.source.banks[0].read_delay.lock().unwrap() = Duration::from_millis(5);
    let params = Parameters { multifd_channels: 2, ..slow() };
    let switched = machines.switch(&params, Capabilities { multifd: true, ..on });
    machines.assert_arrived(&switched);

    let calls = machines.calls[0].lock().unwrap();
    let stop = calls.iter().position(|(_, call)| *call == GUEST_STOPS).unwrap();
    let (before, behind) = calls.split_at(stop);
    let count = |calls: &[(u32, &str)], name| calls.iter().filter(|(_, call)| *call == name).count();
    assert!(count(before, "read running") >= 32 && count(before, "read stopped") == 0, "{before:?}");
    assert_eq!(count(behind, "read running"), 0);
    assert!(count(behind, "read stopped") > 0);
    let statistics = switched.migration.statistics();
    assert_eq!(statistics.streams[0].running_bytes, 8 << 20);
    // The engine does not query the device continuously.
    let inputs = switched.migration.recording().unwrap().inputs();
    let most = 100 + statistics.total_time.as_millis() as usize;
    assert!(inputs < most, "{inputs} inputs of the policy in {:?}", statistics.total_time);
}

#[test]
fn what_a_device_changes_while_it_is_read_is_read_again_before_the_pause() {
    let Some(on) = capabilities(true) else { return };
    let machines = Machines::new();
    // Entries are used from the last to the first.
    *machines.source.banks[0].changes.lock().unwrap() = vec![64 << 10, 1 << 20, 2 << 20];
    let params = Parameters { multifd_channels: 2, ..slow() };
    let switched = machines.switch(&params, Capabilities { multifd: true, ..on });
    machines.assert_arrived(&switched);
    let stream = &switched.migration.statistics().streams[0];
    assert!(stream.running_bytes >= 10 << 20, "{stream:?}");
}

/// Migrates with a device that is read for so long that precopy ends before, although the operator has requested
/// postcopy. On a busy machine, precopy may need longer than a first, short read.
fn in_precopy_for_long(config: &ProcessConfig, switch: impl Fn(&Machines) -> Switched) -> Switched {
    for seconds in [0.4, 2.0, 10.0] {
        let machines = with_slow_device(config, Duration::from_secs_f64(seconds));
        let switched = switch(&machines);
        let (outcome, arrival) = (switched.migration.wait(), switched.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &machines.target.guest);
        if switched.incoming.statistics().postcopy.is_none() {
            return switched;
        }
    }
    panic!("it went on in postcopy");
}

fn with_slow_device(config: &ProcessConfig, read_delay: Duration) -> Machines {
    let machines = Machines::of(config);
    *machines.source.banks[0].read_delay.lock().unwrap() = read_delay;
    // The bank reports that its remaining bytes fit the downtime limit.
    for bank in &machines.source.banks {
        *bank.expects.lock().unwrap() = Some(1 << 30);
    }
    machines
}

#[test]
fn precopy_that_ends_before_the_devices_are_read_drops_nothing() {
    let Some(on) = capabilities(true) else { return };
    let huge = ProcessConfig { backing: Backing::Huge2M, ..config() };
    let has_huge = ProcessGuest::waiting(huge.clone()).and_then(|_| ProcessGuest::boot(huge.clone()));
    for config in [Some(config()), has_huge.is_ok().then_some(huge)].into_iter().flatten() {
        let params = Parameters { multifd_channels: 2, ..common::parameters() };
        let on = Capabilities { multifd: true, ..on };
        in_precopy_for_long(&config, |machines| machines.switch(&params, on));
    }
}

#[test]
fn precopy_that_ends_before_the_devices_are_read_survives_a_cut() {
    let Some(on) = capabilities(true) else { return };
    let params =
        Parameters { multifd_channels: 2, reconnect_window: Duration::from_secs(60), ..common::parameters() };
    let switched = in_precopy_for_long(&config(), |machines| {
        let mut prepare = Vec::new();
        Command::Ping(extension::PREPARE_PING).encode(&mut prepare).unwrap();
        let (mut last, mut is_cut) = (Vec::new(), false);
        let filter: Filter = Box::new(move |line, way, _, piece| {
            if is_cut || (line, way) != (Line::Main, Way::Forward) {
                return Verdict::Pass;
            }
            last.extend_from_slice(piece);
            is_cut = last.windows(prepare.len()).any(|window| window == prepare);
            last.drain(..last.len().saturating_sub(prepare.len()));
            if is_cut { Verdict::Cut } else { Verdict::Pass }
        });
        machines.switch_over(&params, Capabilities { multifd: true, ..on }, filter)
    });
    assert_eq!(switched.migration.statistics().reconnections.len(), 1);
}

#[test]
fn switch_that_waits_for_a_device_is_told_once() {
    let Some(on) = capabilities(true) else { return };
    let machines = Machines::new();
    *machines.source.banks[0].read_delay.lock().unwrap() = Duration::from_millis(200);
    let params = Parameters {
        multifd_channels: 2,
        non_convergence: NonConvergence::Postcopy,
        downtime_limit: Duration::ZERO,
        ..common::parameters()
    };
    let switched = machines.switch(&params, Capabilities { multifd: true, ..on });
    machines.assert_arrived(&switched);
    let told = switched.told.events();
    let warnings = |word| {
        told.iter().filter(|event| matches!(event, Event::Warning(text) if text.contains(word))).count()
    };
    assert_eq!(warnings("the switch to postcopy waits: device \"bank\", instance 0"), 1, "{told:?}");
    assert_eq!(warnings("switches to postcopy"), 0, "an operator has said so before");
}

#[test]
fn device_that_is_loaded_slowly_waits_for_no_page() {
    let Some(on) = capabilities(true) else { return };
    for multifd in [false, true] {
        let machines = Machines::new();
        for bank in &machines.target.banks {
            *bank.load_delay.lock().unwrap() = Duration::from_millis(10);
        }
        let params = Parameters { multifd_channels: 2, ..trickle() };
        let switched = machines.switch(&params, Capabilities { multifd, ..on });
        eventually("the guest runs there", || machines.target.guest.run_state() == RunState::Running);
        // The devices were started first.
        assert!(machines.target.banks.iter().all(|bank| bank.runs()));
        let missing = switched.incoming.statistics().postcopy.unwrap().missing_pages;
        assert!(missing > 0, "no page was there when they were loaded");
        switched.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
        machines.assert_arrived(&switched);
    }
}

#[test]
fn call_that_fails_leaves_the_guest_and_its_devices_at_the_source() {
    let Some(ways) = ways(true) else { return };
    let all = [
        (0, ["quiesce", "stop", "read stopped", "configuration"].as_slice()),
        (1, ["begin_load", "write", "finish_load", "run"].as_slice()),
    ];
    // Over the main channel, only the last reads and the end of loading differ.
    let over_main = [(0, ["read stopped"].as_slice()), (1, ["finish_load"].as_slice())];
    for ((params, on), calls) in [(&ways[0], over_main), (&ways[3], all)] {
        for (side, call) in
            calls.into_iter().flat_map(|(side, calls)| calls.iter().map(move |call| (side, *call)))
        {
            let machines = Machines::new();
            let fails = [&machines.source, &machines.target][side].banks[1].clone();
            fails.fail(Some(call));
            let switched = machines.switch(params, *on);
            let (outcome, arrival) = (switched.migration.wait(), switched.incoming.wait());
            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{call}: {outcome:?}");
            assert!(matches!(arrival, Arrival::Failed(_)), "{call}: {arrival:?}");
            let (Outcome::Failed { error: ours, .. }, Arrival::Failed(theirs)) = (&outcome, &arrival) else {
                unreachable!("both are asserted above")
            };
            let why = vm_error([ours, theirs][side]);
            assert!(why.what.starts_with("device \"bank\", instance 1: "), "{call}: {why}");
            assert_eq!(machines.source.guest.run_state(), RunState::Running, "{call}");
            assert!(machines.source.banks.iter().all(|bank| bank.runs()), "{call}");

            // The next attempt includes these devices.
            fails.fail(None);
            drop(switched);
            machines.assert_arrived(&machines.switch(params, *on));
        }
    }
}

#[test]
fn stream_that_did_not_come_is_named_before_the_guest_runs() {
    let Some(on) = capabilities(false) else { return };
    for lanes in [0, 2] {
        let machines = Machines::new();
        let limits = WaitLimits { stall: Duration::from_secs(1), ..WaitLimits::default() };
        let params = Parameters { multifd_channels: 2, limits, ..slow() };
        let incoming = vm::listen(&machines.target, &params, Capabilities { multifd: lanes > 0, ..on });
        let mut source = HandMadeSource::of(&machines.source.guest, &incoming.address()).with_lanes(lanes);
        source.open_as_sterna();
        source.hear_pong(0x10);
        source.discard_all();
        let devices = source.devices();
        source.package(&devices, &[Command::Ping(extension::PREPARE_PING)]);

        let arrival = incoming.wait();
        let Arrival::Failed(MigrationError::PeerMisbehaved(Misbehaviour::Chunk { device, instance, why })) =
            arrival
        else {
            panic!("{arrival:?}");
        };
        assert_eq!((&device[..], instance, why), ("bank", 0, BadChunk::NoneCame));
        assert_eq!(*machines.target.starts.lock().unwrap(), 0);
    }
}

#[test]
fn guest_whose_connection_breaks_goes_on_with_its_devices() {
    let Some(on) = capabilities(true) else { return };
    let params = Parameters { multifd_channels: 2, reconnect_window: Duration::from_secs(60), ..trickle() };
    let machines = Machines::new();
    let switched = machines.switch(&params, Capabilities { multifd: true, ..on });
    until_status(&switched.migration, Status::PostcopyActive);
    switched.proxy.cut();
    let recovered = |event: &Event| matches!(event, Event::Status(Status::PostcopyRecover));
    eventually("the recovery", || switched.told.events().iter().any(recovered));
    switched.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    machines.assert_arrived(&switched);
}
