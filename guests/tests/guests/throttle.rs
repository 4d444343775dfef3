//! The process guest is throttled as a VMM throttles its vCPUs.

use crate::common;

use std::time::{Duration, Instant};

use sterna::{SourceVm, Throttle};
use sterna_guests::ProcessGuest;
use sterna_guests::process::ProcessConfig;

const LONG: Duration = Duration::from_secs(30);

fn running(workers: usize) -> std::sync::Arc<ProcessGuest> {
    let config = ProcessConfig { blocks: vec![("ram".into(), 4 << 20)], workers, ..ProcessConfig::default() };
    let guest = ProcessGuest::boot(config).unwrap();
    guest.cont().unwrap();
    assert!(guest.wait_progress(1000, LONG));
    guest
}

#[test]
fn throttled_workers_take_fewer_steps() {
    let guest = running(2);
    let total = || guest.progress().total_steps();

    // The percentages alternate, so that other load of the machine affects all of them equally.
    let (mut taken, percents) = ([0; 3], [0, 50, 90]);
    for _ in 0..8 {
        for (taken, percent) in taken.iter_mut().zip(percents) {
            guest.set_cpu_throttle(percent);
            let (begin, before) = (Instant::now(), total());
            while begin.elapsed() < Duration::from_millis(150) {
                std::thread::sleep(Duration::from_millis(5));
            }
            *taken += total() - before;
        }
    }

    let [free, half, tenth] = taken;
    common::report(&format!("{free} steps free, {half} at 50 %, {tenth} at 90 %"));
    assert!(half < free * 8 / 10 && tenth < free * 4 / 10 && tenth < half && tenth > 0, "{taken:?}");
}

#[test]
fn throttled_guest_stops_and_runs_whenever_it_is_told_to() {
    let guest = running(4);
    guest.set_cpu_throttle(255);
    for round in 0..100 {
        guest.cont().unwrap();
        std::thread::sleep(Duration::from_millis(round % 25));
        guest.pause().unwrap();
        let verdict = guest.check().unwrap();
        assert!(verdict.is_consistent(), "{verdict}");
    }
    guest.cont().unwrap();
    assert!(guest.wait_progress(1, LONG), "throttled, it goes on all the same");
    guest.set_cpu_throttle(0);
    assert!(guest.wait_progress(100_000, LONG), "it runs freely again");
}

#[test]
fn dirty_limit_of_one_worker_slows_that_one_down() {
    let guest = running(2);
    assert!(guest.can_limit_dirty_rate());

    guest.set_dirty_limit(Some(0), Some(1 << 20)).unwrap();

    // Wait until a whole rate period lies within the time of the limit.
    let begin = Instant::now();
    let rates = loop {
        let rates = guest.vcpu_dirty_rates();
        if (1..16 << 20).contains(&rates[0].rate_bytes) && rates[1].rate_bytes > 0 {
            break rates;
        }
        assert!(begin.elapsed() < LONG, "{rates:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    common::report(&format!("{rates:?}"));
    assert_eq!([rates[0].limit_bytes, rates[1].limit_bytes], [Some(1 << 20), None]);
    assert!(rates[1].rate_bytes > 2 * rates[0].rate_bytes, "{rates:?}");
    guest.set_dirty_limit(None, None).unwrap();
    assert!(guest.wait_progress(100_000, LONG), "it runs freely again");
    assert_eq!(guest.vcpu_dirty_rates()[0].limit_bytes, None);

    // The limits of a paused guest are reported too.
    guest.set_dirty_limit(Some(1), Some(1 << 20)).unwrap();
    guest.pause().unwrap();
    let limits: Vec<_> = guest.vcpu_dirty_rates().iter().map(|rate| rate.limit_bytes).collect();
    assert_eq!(limits, [None, Some(1 << 20)]);
}

#[test]
fn dirty_limits_that_cannot_be_are_refused() {
    let guest = running(2);

    assert!(guest.set_dirty_limit(Some(2), Some(1 << 20)).is_err(), "there is no such worker");
    assert!(guest.set_dirty_limit(None, Some(0)).is_err(), "it would never go on");

    assert!(SourceVm::throttle(&*guest).is_some());
    let waiting = ProcessGuest::waiting(ProcessConfig::default()).unwrap();
    assert!(waiting.set_dirty_limit(None, Some(1 << 20)).is_err(), "there is no guest");
    assert!(waiting.set_dirty_limit(None, None).is_ok(), "and nothing to take back");
    assert!(waiting.vcpu_dirty_rates().is_empty());
}
