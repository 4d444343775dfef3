//! Tests of machines with dirty rings and throttled vCPUs.
#![allow(clippy::print_stderr, missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::tides::{assert_consistent, machine, steps, tide};
use crate::common::{kvm_or_skip, rings_or_skip, wait_for};
use sterna::dirty_rate::DirtyRateMeasurement;
use sterna::{
    Address, Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm,
    TargetVm, Throttle, VcpuDirtyRate,
};
use sterna_guests::tide::{Tide, TideConfig};
use sterna_guests::{Fill, Pattern};
use sterna_ram::DirtyBitmaps;
use sterna_ram::missing_pages::MissingPages;
use sterna_vmm::{KvmMachine, MachineConfig, VmmError};

/// A ring so small that it is always full.
const TINY: Option<u32> = Some(256);

fn migrate(
    source: &Arc<KvmMachine>,
    target: &Arc<KvmMachine>,
    capabilities: Capabilities,
) -> (Outcome, Arrival) {
    // Slow, so that the guest fills its rings for a while. The downtime limit is long enough to finish.
    let params = Parameters {
        max_bandwidth_bytes: 60 << 20,
        downtime_limit: Duration::from_secs(10),
        ..Parameters::default()
    };
    let (migration, incoming) = begin(source, target, params, capabilities);
    (migration.wait(), incoming.wait())
}

fn begin(
    source: &Arc<KvmMachine>,
    target: &Arc<KvmMachine>,
    params: Parameters,
    capabilities: Capabilities,
) -> (Migration, Incoming) {
    let (from, to): (Arc<dyn SourceVm>, Arc<dyn TargetVm>) =
        (Arc::clone(source) as _, Arc::clone(target) as _);
    let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(to, &address, params.clone(), capabilities, Arc::new(())).unwrap();
    let migration = Migration::start(from, &incoming.address(), params, capabilities, Arc::new(())).unwrap();
    (migration, incoming)
}

/// Checks that the tide continues on the destination, and that both sides' memory is consistent.
fn assert_goes_on_whole(tide: &Tide, source: &KvmMachine, target: &KvmMachine) {
    let arrived = steps(tide, target);
    wait_for("steps after the move", || {
        steps(tide, target).iter().zip(&arrived).all(|(now, then)| *now > then + 100)
    });
    target.stop();
    assert_consistent(tide, target);
    assert_consistent(tide, source);
}

#[test]
fn tide_over_tiny_rings_migrates_bit_for_bit() {
    let test = "tide_over_tiny_rings_migrates_bit_for_bit";
    if !rings_or_skip(test) {
        return;
    }
    let multifd = Capabilities { multifd: true, ..Capabilities::default() };
    for (pattern, capabilities) in [
        (Pattern::Mixed, multifd),
        (Pattern::Sequential, Capabilities::default()),
        (Pattern::HotSet, multifd),
    ] {
        let tide = tide(TideConfig { vcpus: 3, pattern, fill: Fill::Half(3), ..TideConfig::default() });
        let (source, target) = (machine(&tide, TINY, false), machine(&tide, TINY, true));
        source.resume().unwrap();
        wait_for("first steps", || steps(&tide, &source).iter().all(|steps| *steps > 100));

        let ends = migrate(&source, &target, capabilities);

        assert!(matches!(ends, (Outcome::Completed, Arrival::Completed(_))), "{pattern}: {ends:?}");
        let ring = source.dirty_ring().unwrap();
        eprintln!("{test}: {pattern}: {} times full, {:?} pages", ring.full_exits(), ring.reported());
        // The numbers depend on the guest's share of the processors, so only their presence is checked.
        assert!(ring.full_exits() > 0, "{pattern}: {} times full", ring.full_exits());
        assert!(ring.reported().iter().all(|pages| *pages > 0), "{pattern}: {:?}", ring.reported());
        // Both ring sizes belong to the same machine type: the guest continues on either side.
        assert_goes_on_whole(&tide, &source, &target);
    }
}

#[test]
fn tide_over_tiny_rings_is_switched_to_postcopy() {
    let test = "tide_over_tiny_rings_is_switched_to_postcopy";
    if !rings_or_skip(test) {
        return;
    }
    if let Err(error) = MissingPages::probe() {
        eprintln!("SKIPPED {test}: {error}");
        return;
    }
    let on = Capabilities { postcopy_ram: true, postcopy_preempt: true, ..Capabilities::default() };
    for (pattern, capabilities, multifd_compression) in [
        (Pattern::Mixed, on, Compression::None),
        (Pattern::HotSet, Capabilities { multifd: true, ..on }, Compression::None),
        (Pattern::Mixed, Capabilities { multifd: true, ..on }, Compression::Zstd),
    ] {
        let tide = tide(TideConfig { vcpus: 3, pattern, fill: Fill::Half(3), ..TideConfig::default() });
        let (source, target) = (machine(&tide, TINY, false), machine(&tide, TINY, true));
        source.resume().unwrap();
        wait_for("first steps", || steps(&tide, &source).iter().all(|steps| *steps > 100));
        // The downtime limit of 0 keeps the migration from ending.
        let params = Parameters {
            max_bandwidth_bytes: 60 << 20,
            downtime_limit: Duration::ZERO,
            multifd_compression,
            ..Parameters::default()
        };

        let (migration, incoming) = begin(&source, &target, params, capabilities);
        wait_for("what the rings tell", || migration.statistics().rounds_begun >= 2);
        migration.start_postcopy().unwrap();
        let ends = (migration.wait(), incoming.wait());

        assert!(matches!(ends, (Outcome::Completed, Arrival::Completed(_))), "{pattern}: {ends:?}");
        assert!(incoming.statistics().postcopy.is_some(), "{pattern}: it ran early");
        assert_goes_on_whole(&tide, &source, &target);
    }
}

#[test]
fn throttled_guest_takes_fewer_steps() {
    if !kvm_or_skip("throttled_guest_takes_fewer_steps") {
        return;
    }
    let tide = tide(TideConfig { vcpus: 2, ..TideConfig::default() });
    let machine = machine(&tide, None, false);
    machine.resume().unwrap();
    wait_for("first steps", || steps(&tide, &machine).iter().all(|steps| *steps > 100));
    let total = || steps(&tide, &machine).iter().sum::<u64>();

    // Measured alternately, so that other load on the host affects all limits equally. Measured longer under
    // load, because a guest that sleeps gets a larger share of a busy processor when it wakes than one that
    // never sleeps.
    let (mut taken, percents) = ([0; 3], [0, 50, 90]);
    let tells_apart = |[free, half, tenth]: [u64; 3]| tenth * 2 < free && tenth < half;
    for turn in 0..100 {
        if turn >= 8 && tells_apart(taken) {
            break;
        }
        for (taken, percent) in taken.iter_mut().zip(percents) {
            machine.set_cpu_throttle(percent);
            let (begin, before) = (Instant::now(), total());
            while begin.elapsed() < Duration::from_millis(150) {
                std::thread::sleep(Duration::from_millis(5));
            }
            *taken += total() - before;
        }
    }

    machine.set_cpu_throttle(0);
    let [free, half, tenth] = taken;
    eprintln!("throttled_guest_takes_fewer_steps: {free} steps free, {half} at 50 %, {tenth} at 90 %");
    assert!(tells_apart(taken), "{taken:?}");
    assert!(tenth > 0, "it goes on all the same");
    machine.stop();
    assert_consistent(&tide, &machine);
}

#[test]
fn throttled_guest_stops_and_runs_whenever_it_is_told_to() {
    if !kvm_or_skip("throttled_guest_stops_and_runs_whenever_it_is_told_to") {
        return;
    }
    let tide = tide(TideConfig { vcpus: 4, ..TideConfig::default() });
    let machine = machine(&tide, None, false);
    // The maximum: each sleep would last one to two seconds.
    machine.set_cpu_throttle(255);
    let mut before = steps(&tide, &machine);

    for round in 0..100 {
        machine.resume().unwrap();
        std::thread::sleep(Duration::from_millis(round % 25));
        machine.stop();
        assert_consistent(&tide, &machine);
    }
    machine.resume().unwrap();
    wait_for("steps under the throttle", || steps(&tide, &machine).iter().zip(&before).all(|(n, b)| n > b));
    machine.set_cpu_throttle(0);
    before = steps(&tide, &machine);
    wait_for("steps without it", || {
        steps(&tide, &machine).iter().zip(&before).all(|(now, before)| *now > before + 1000)
    });
}

#[test]
fn dirty_limit_of_one_vcpu_slows_that_one_down() {
    let test = "dirty_limit_of_one_vcpu_slows_that_one_down";
    if !rings_or_skip(test) {
        return;
    }
    let tide = tide(TideConfig { vcpus: 2, ..TideConfig::default() });
    let machine = machine(&tide, Some(4096), false);
    let source = SourceVm::dirty_source(&*machine);
    assert!(machine.can_limit_dirty_rate());
    source.start().unwrap();
    machine.resume().unwrap();
    let mut dirty = DirtyBitmaps::new(machine.ram());
    let mut advance = |vcpu: usize, by: u64| {
        let before = steps(&tide, &machine);
        wait_for("steps", || {
            // A sync re-arms the pages, so that pages written again count again.
            source.sync(&mut dirty).unwrap();
            steps(&tide, &machine)[vcpu] > before[vcpu] + by
        });
        let now = steps(&tide, &machine);
        [now[0] - before[0], now[1] - before[1]]
    };
    advance(0, 1000);

    machine.set_dirty_limit(Some(0), Some(256 << 10)).unwrap();

    let limited = advance(1, 40_000);
    let mut rates = machine.vcpu_dirty_rates();
    wait_for("a period under the limit", || {
        advance(1, 1000);
        rates = machine.vcpu_dirty_rates();
        rates[0].rate_bytes < rates[1].rate_bytes / 2
    });
    eprintln!("{test}: {limited:?} steps, {rates:?}");
    assert!(limited[0] < limited[1] / 2, "{limited:?}");
    assert_eq!([rates[0].limit_bytes, rates[1].limit_bytes], [Some(256 << 10), None]);
    let times = machine.dirty_limit_times().unwrap();
    assert!(!times.throttled_per_round.is_zero() && !times.ring_full.is_zero(), "{times:?}");
    machine.set_dirty_limit(None, None).unwrap();
    assert_eq!(machine.dirty_limit_times(), None);
    advance(0, 20_000);
    assert!(machine.set_dirty_limit(Some(2), None).is_err(), "there is no such vCPU");
    assert!(machine.set_dirty_limit(None, Some(0)).is_err(), "it would never go on");
    machine.stop();
    source.stop().unwrap();
    assert_consistent(&tide, &machine);
}

#[test]
fn vcpu_dirty_rates_name_every_vcpu_and_its_limit_while_nothing_is_tracked_too() {
    let test = "vcpu_dirty_rates_name_every_vcpu_and_its_limit_while_nothing_is_tracked_too";
    if !rings_or_skip(test) {
        return;
    }
    let tide = tide(TideConfig { vcpus: 2, ..TideConfig::default() });
    let machine = machine(&tide, Some(4096), false);
    let unlimited = VcpuDirtyRate::default();
    let limited = VcpuDirtyRate { limit_bytes: Some(5 << 20), ..unlimited };
    assert_eq!(machine.vcpu_dirty_rates(), [unlimited, unlimited]);

    machine.set_dirty_limit(Some(1), Some(5 << 20)).unwrap();

    assert_eq!(machine.vcpu_dirty_rates(), [unlimited, limited]);
    let source = SourceVm::dirty_source(&*machine);
    source.start().unwrap();
    assert_eq!(machine.vcpu_dirty_rates()[1].limit_bytes, Some(5 << 20), "in the first moment, too");
    machine.resume().unwrap();
    // Before one second is complete.
    wait_for("a rate", || machine.vcpu_dirty_rates().iter().all(|vcpu| vcpu.rate_bytes > 0));
    machine.stop();
    source.stop().unwrap();
    assert_eq!(machine.vcpu_dirty_rates(), [unlimited, limited], "nothing is counted any more");
    machine.set_dirty_limit(Some(1), None).unwrap();
    assert_eq!(machine.vcpu_dirty_rates(), [unlimited, unlimited]);
}

#[test]
fn calc_dirty_rate_over_rings_knows_each_vcpus_rate() {
    let test = "calc_dirty_rate_over_rings_knows_each_vcpus_rate";
    if !rings_or_skip(test) {
        return;
    }
    let tide = tide(TideConfig { vcpus: 2, ..TideConfig::default() });
    let machine = machine(&tide, Some(4096), false);
    machine.resume().unwrap();
    wait_for("first steps", || steps(&tide, &machine).iter().all(|steps| *steps > 100));

    // Shorter than the second over which rates are otherwise measured.
    let vm: Arc<dyn SourceVm> = Arc::clone(&machine) as _;
    let reading = DirtyRateMeasurement::start(vm, Duration::from_millis(300)).unwrap().wait().unwrap();

    eprintln!("{test}: {reading:?}");
    assert_eq!(reading.vcpu_bytes_per_second.len(), 2);
    assert!(reading.vcpu_bytes_per_second.iter().all(|rate| *rate > 0), "{reading:?}");
    machine.stop();
    assert_consistent(&tide, &machine);
}

#[test]
fn dirty_limit_without_rings_is_refused() {
    if !kvm_or_skip("dirty_limit_without_rings_is_refused") {
        return;
    }
    let tide = tide(TideConfig::default());
    let machine = machine(&tide, None, false);

    let refused = machine.set_dirty_limit(None, Some(1 << 20)).unwrap_err();

    assert!(refused.to_string().contains("--dirty-ring-size"), "{refused}");
    assert!(!machine.can_limit_dirty_rate() && machine.vcpu_dirty_rates().is_empty());
}

#[test]
fn ring_size_that_cannot_be_is_refused() {
    for entries in [0, 1, 255, 1000, 1 << 17] {
        let config =
            MachineConfig { dirty_ring_size: Some(entries), incoming: true, ..MachineConfig::new("bad") };
        match KvmMachine::new(config) {
            Err(error @ VmmError::Config { what: "dirty-ring-size", .. }) => {
                assert!(error.to_string().contains("power of two"), "{error}");
            }
            other => panic!("{entries}: {other:?}"),
        }
    }
}
