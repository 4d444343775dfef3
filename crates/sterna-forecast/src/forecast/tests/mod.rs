//! Tests the forecast with published cases and for monotony in every input. Also compares it with guests that are
//! simulated page by page.
#![allow(clippy::print_stderr, reason = "says its seed, and how far it was off")]

mod guests;
mod postcopy;
mod properties;
mod published;

use std::time::Duration;

use super::*;

const GB: u64 = 1_000_000_000;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Inputs with 64 GiB of RAM, 10 GB/s, and a guest that writes at `rate`.
fn steady(rate: u64) -> Inputs {
    Inputs {
        ram_bytes: 64 << 30,
        first_round_bytes: 64 << 30,
        bandwidth_bytes: 10 * GB,
        switchover_bandwidth_bytes: None,
        avail_switchover_bandwidth_bytes: None,
        dirty: DirtyModel::Rate(rate),
        sync: ms(10),
        downtime_limit: ms(300),
        fixed: Fixed::default(),
        postcopy: PostcopyInputs::default(),
        uncertainty: UNCERTAINTY,
    }
}

#[test]
fn forecast_of_an_idle_guest_is_one_round_and_a_short_downtime() {
    let inputs = Inputs { first_round_bytes: 20 * GB, ..steady(0) };

    let forecast = Forecast::new(&inputs);

    assert!(forecast.convergent && forecast.certain && forecast.advice.is_empty());
    assert_eq!(forecast.rounds.expected, Some(1.0));
    // The sync, and the data in sockets.
    let downtime = 0.01 + simulate::QUEUED_BYTES / 10e9;
    assert!((forecast.downtime.expected.unwrap() - downtime).abs() < 1e-9);
    // The round, the sync that finds no page, and the downtime.
    let total = forecast.total_time.expected.unwrap();
    assert!((total - 2.0 - 0.01 - downtime).abs() < 1e-6, "{total}");
    assert_eq!(forecast.bytes.expected, Some(20e9));
}

#[test]
fn forecast_adds_the_fixed_parts_to_the_downtime() {
    let fixed = Fixed { setup: ms(40), stop: ms(1), devices: ms(5), start: ms(2) };
    let inputs = Inputs { fixed, ..steady(0) };

    let forecast = Forecast::new(&inputs);

    let downtime = 0.018 + simulate::QUEUED_BYTES / 10e9;
    assert!((forecast.downtime.expected.unwrap() - downtime).abs() < 1e-9);
    let plain = Forecast::new(&steady(0));
    let more = forecast.total_time.expected.unwrap() - plain.total_time.expected.unwrap();
    assert!((more - 0.048).abs() < 1e-9);
}

#[test]
fn forecast_above_the_bandwidth_does_not_converge_and_every_advice_works() {
    let inputs = steady(12 * GB);

    let forecast = Forecast::new(&inputs);

    assert!(!forecast.convergent);
    assert_eq!((forecast.total_time.expected, forecast.total_time.high), (None, None));
    let worse = |inputs: &Inputs, throttle: f64| {
        let luck = Luck::worse(UNCERTAINTY);
        simulate::run(inputs, Luck { dirtying: luck.dirtying * throttle, ..luck }).convergent
    };
    let mut kinds = 0;
    for advice in &forecast.advice {
        match *advice {
            Advice::RaiseDowntimeLimit { milliseconds } => {
                kinds += 1;
                assert!(worse(&Inputs { downtime_limit: ms(milliseconds), ..inputs.clone() }, 1.0));
            }
            Advice::RaiseBandwidth { bytes_per_second } => {
                kinds += 1;
                assert!(worse(&Inputs { bandwidth_bytes: bytes_per_second, ..inputs.clone() }, 1.0));
                assert!(bytes_per_second > 12 * GB && bytes_per_second < 20 * GB, "{bytes_per_second}");
            }
            Advice::Throttle { percent } | Advice::AutoConverge { percent } => {
                kinds += 1;
                assert!(worse(&inputs, 1.0 - f64::from(percent) / 100.0));
                assert!(!worse(&inputs, 1.0 - f64::from(percent - 1) / 100.0), "it is the mildest");
            }
            Advice::MoreChannels | Advice::Postcopy => {}
        }
    }
    assert_eq!(kinds, 4, "{:?}", forecast.advice);
}

#[test]
fn forecast_above_the_bandwidth_does_not_end_wherever_the_guest_stands_in_its_walk() {
    let forecast = Forecast::new(&steady(15 * GB));

    assert_eq!((forecast.total_time.low, forecast.total_time.high), (None, None));
}

#[test]
fn forecast_under_a_limit_decides_by_the_limit_and_switches_over_at_the_links_speed() {
    // A sync of 10 ms begins in the middle of a round, so the round lasts 16.7 ms. The guest writes 0.8 GB/s.
    let remaining = 13.3e6 + simulate::QUEUED_BYTES;
    let limited = Inputs {
        bandwidth_bytes: GB,
        switchover_bandwidth_bytes: Some(10 * GB),
        dirty: DirtyModel::Rate(8 * GB / 10),
        downtime_limit: ms(35),
        ..steady(0)
    };

    let forecast = Forecast::new(&limited);

    assert!(forecast.convergent);
    let downtime = forecast.downtime.expected.unwrap();
    assert!(downtime < 0.01 + 1.5 * remaining / 10e9, "{downtime}");
    assert!(forecast.total_time.expected.unwrap() > 64.0, "{forecast:?}");
    let short = Inputs { downtime_limit: ms(15), ..limited };
    assert!(!Forecast::new(&short).convergent, "it is not estimated that fast");
    let stated = Inputs { avail_switchover_bandwidth_bytes: Some(10 * GB), ..short };
    assert!(Forecast::new(&stated).convergent, "an operator says that it is");
}

#[test]
fn forecast_whose_stated_bandwidth_is_not_there_says_what_downtime_comes_of_it() {
    let stated = Inputs {
        bandwidth_bytes: GB,
        avail_switchover_bandwidth_bytes: Some(1000 * GB),
        dirty: DirtyModel::Rate(2 * GB),
        ..steady(0)
    };

    let forecast = Forecast::new(&stated);

    assert!(forecast.convergent);
    assert!(forecast.downtime.expected.unwrap() > 0.3, "{forecast:?}");
}

#[test]
fn forecast_of_a_rest_that_fits_until_lanes_run_dry_ends() {
    // A sync takes most of the limit. If a second one preceded the stop, the guest would write more than fits in the
    // meantime, after every round.
    let inputs = Inputs {
        ram_bytes: 11_992_861_535,
        first_round_bytes: 786_564_394,
        bandwidth_bytes: 3_086_291_866,
        dirty: DirtyModel::Rate(595_168_468),
        sync: Duration::from_micros(88_010),
        downtime_limit: Duration::from_micros(137_449),
        fixed: Fixed { devices: Duration::from_micros(89), ..Fixed::default() },
        ..steady(0)
    };

    let forecast = Forecast::new(&inputs);

    assert!(forecast.convergent, "{forecast:?}");
    assert!(forecast.downtime.expected.unwrap() <= 0.137_449, "{forecast:?}");
}

#[test]
fn forecast_near_the_limit_says_that_it_is_not_certain() {
    let forecast = Forecast::new(&steady(95 * GB / 10));

    assert!(forecast.convergent && !forecast.certain);
    assert!(forecast.total_time.expected.is_some() && forecast.total_time.high.is_none());
    assert!(!forecast.advice.is_empty());
}

#[test]
fn forecast_of_a_small_hot_set_converges_however_fast_it_is_written() {
    // 100 MB, written 40 times per second: 4 GB/s over a link of 2 GB/s.
    let class = Class { pages: 25_000.0, writes_per_second: 1e6, order: Order::Random };
    let inputs = Inputs { bandwidth_bytes: 2 * GB, dirty: DirtyModel::WorkingSet(vec![class]), ..steady(0) };

    let forecast = Forecast::new(&inputs);

    assert!(forecast.convergent);
    let downtime = forecast.downtime.expected.unwrap();
    assert!((0.04..0.07).contains(&downtime), "{downtime}");
    assert!(!Forecast::new(&Inputs { downtime_limit: ms(30), ..inputs }).convergent);
}

#[test]
fn forecast_takes_any_inputs_without_panicking() {
    for bandwidth_bytes in [0, 1, u64::MAX] {
        for ram_bytes in [0, 4096, u64::MAX] {
            for dirty in [
                DirtyModel::Rate(u64::MAX),
                DirtyModel::Curve(vec![]),
                DirtyModel::Curve(vec![Point { interval: Duration::ZERO, distinct_bytes: 7 }]),
                DirtyModel::WorkingSet(vec![Class {
                    pages: f64::NAN,
                    writes_per_second: f64::INFINITY,
                    order: Order::Random,
                }]),
            ] {
                let inputs = Inputs {
                    bandwidth_bytes,
                    ram_bytes,
                    first_round_bytes: u64::MAX,
                    dirty,
                    uncertainty: f64::NAN,
                    ..steady(0)
                };

                let forecast = Forecast::new(&inputs);

                assert!(forecast.rounds.expected.is_none_or(f64::is_finite), "{forecast:?}");
                rules::Comparison::new(&rules::Load::of(&inputs));
            }
        }
    }
}
