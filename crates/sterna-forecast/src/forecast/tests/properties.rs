//! Tests that a better input never makes a forecast worse.

use super::super::simulate;
use super::*;

/// Random generator of inputs.
struct Dice(fastrand::Rng);

impl Dice {
    fn new(test: &str) -> Self {
        Self(sterna_testing::random(test))
    }

    fn next(&mut self) -> f64 {
        self.0.f64()
    }

    /// A random number, distributed evenly over the orders of magnitude between the two.
    fn between(&mut self, least: f64, greatest: f64) -> f64 {
        least * (greatest / least).powf(self.next())
    }

    fn inputs(&mut self) -> Inputs {
        let ram_bytes = self.between(1e8, 1e12) as u64;
        let class = |dice: &mut Self| {
            let pages = dice.between(1e-4, 1.0) * ram_bytes as f64 / 4096.0;
            let order = if dice.next() < 0.5 { Order::Random } else { Order::Sequential };
            Class { pages, writes_per_second: pages * dice.between(1e-3, 1e3), order }
        };
        let dirty = match (self.next() * 3.0) as u32 {
            0 => DirtyModel::Rate(self.between(1e6, 4e10) as u64),
            1 => DirtyModel::WorkingSet(vec![class(self), class(self)]),
            _ => {
                let of = DirtyModel::WorkingSet(vec![class(self), class(self)]);
                let point = |milliseconds| Point {
                    interval: ms(milliseconds),
                    distinct_bytes: of.distinct_bytes(ms(milliseconds), ram_bytes) as u64,
                };
                DirtyModel::Curve([50, 100, 300, 1000].map(point).to_vec())
            }
        };
        Inputs {
            ram_bytes,
            first_round_bytes: (ram_bytes as f64 * self.next()) as u64,
            bandwidth_bytes: self.between(1e8, 2e10) as u64,
            switchover_bandwidth_bytes: None,
            avail_switchover_bandwidth_bytes: None,
            dirty,
            sync: Duration::from_secs_f64(self.between(1e-6, 0.2)),
            downtime_limit: Duration::from_secs_f64(self.between(1e-3, 3.0)),
            fixed: Fixed { devices: Duration::from_secs_f64(self.between(1e-6, 0.05)), ..Fixed::default() },
            postcopy: PostcopyInputs::default(),
            uncertainty: self.next() * 0.5,
        }
    }
}

/// Allowed deviation from monotony. A page that a round sends counts only if it is written afterwards, but a page that
/// the round does not send always counts. So a smaller round can be followed by a slightly larger one. And a sync
/// begins at an input, at least 0.5 ms after the previous one, which moves the end of rounds of a few milliseconds.
const SLACK: f64 = 1.05;
/// Allowed rounding error.
const HAIR: f64 = 1.0 + 1e-6;

#[test]
fn simulation_is_monotone_in_bandwidth_dirty_rate_and_limit() {
    let mut dice = Dice::new("simulation_is_monotone_in_bandwidth_dirty_rate_and_limit");
    for _ in 0..1500 {
        let inputs = dice.inputs();
        let better = 1.0 + dice.next() * 3.0;
        let luck = Luck {
            walk: [Walk::Ahead, Walk::Anywhere, Walk::Behind][(dice.next() * 3.0) as usize],
            ..Luck::EXPECTED
        };
        let plain = simulate::run(&inputs, luck);
        for (what, limit, luck) in [
            ("bandwidth", 1.0, Luck { bandwidth: better, ..luck }),
            ("dirty rate", 1.0, Luck { dirtying: 1.0 / better, ..luck }),
            ("limit", better, luck),
        ] {
            let under = |limit: f64| {
                let downtime_limit = inputs.downtime_limit.mul_f64(limit);
                simulate::run(&Inputs { downtime_limit, ..inputs.clone() }, luck)
            };
            let run = under(limit);
            let ends = run.convergent || !plain.convergent || under(limit * SLACK).convergent;
            assert!(ends, "{what} ×{better}: {inputs:?}");
            let least = run.least_downtime <= plain.least_downtime * SLACK;
            assert!(least || run.convergent, "{what} ×{better}: {inputs:?}\n{plain:?}\n{run:?}");
        }
    }
}

#[test]
fn rules_are_monotone_in_bandwidth_dirty_rate_sync_and_limit() {
    use super::super::rules::{Comparison, Load};
    let mut dice = Dice::new("rules_are_monotone_in_bandwidth_dirty_rate_sync_and_limit");
    for _ in 0..20_000 {
        let load = Load {
            bandwidth_bytes: dice.between(1e8, 2e10),
            dirty_bytes: dice.between(1e6, 2e10),
            sync: Duration::from_secs_f64(dice.between(1e-6, 0.3)),
            downtime_limit: Duration::from_secs_f64(dice.between(1e-3, 3.0)),
            fixed: Duration::from_secs_f64(dice.between(1e-6, 0.05)),
        };
        let better = 1.0 + dice.next() * 3.0;
        let plain = Comparison::new(&load);
        for (what, other) in [
            ("bandwidth", Load { bandwidth_bytes: load.bandwidth_bytes * better, ..load }),
            ("dirty rate", Load { dirty_bytes: load.dirty_bytes / better, ..load }),
            ("sync", Load { sync: load.sync.div_f64(better), ..load }),
            ("limit", Load { downtime_limit: load.downtime_limit.mul_f64(better), ..load }),
        ] {
            let other = Comparison::new(&other);
            for (one, two) in [
                (plain.qemu, other.qemu),
                (plain.sterna, other.sterna),
                (plain.engine, other.engine),
                (plain.physics, other.physics),
            ] {
                assert!(two.converges || !one.converges, "{what} ×{better}: {load:?}");
                assert!(two.largest_dirty_bytes * HAIR >= one.largest_dirty_bytes, "{what}: {load:?}");
                let (one, two) = (one.downtime_needed, two.downtime_needed);
                assert!(
                    two.unwrap_or(f64::INFINITY) <= one.unwrap_or(f64::INFINITY) * HAIR,
                    "{what} ×{better}: {load:?}"
                );
            }
        }
    }
}

#[test]
fn distinct_bytes_rise_with_time_ever_more_slowly() {
    let mut dice = Dice::new("distinct_bytes_rise_with_time_ever_more_slowly");
    for _ in 0..500 {
        let inputs = dice.inputs();
        let distinct = |tenth: u32| inputs.dirty.distinct_bytes(ms(u64::from(tenth) * 10), inputs.ram_bytes);
        let (mut before, mut rise_before) = (0.0, f64::INFINITY);
        for tenth in 1..300 {
            let now = distinct(tenth);
            let rise = now - before;
            assert!(rise >= -1.0 && rise <= rise_before * HAIR + 1.0, "{inputs:?} at {tenth}");
            assert!(now <= inputs.ram_bytes as f64);
            (before, rise_before) = (now, rise);
        }
    }
}

#[test]
fn forecast_written_and_read_again_is_equal() {
    let mut dice = Dice::new("forecast_written_and_read_again_is_equal");
    for _ in 0..200 {
        let inputs = dice.inputs();
        let text = serde_json::to_string(&inputs).unwrap();
        let again: Inputs = serde_json::from_str(&text).unwrap();
        // Durations have nanoseconds, and seconds in JSON keep them.
        assert_eq!(
            (again.sync, again.downtime_limit, again.fixed),
            (inputs.sync, inputs.downtime_limit, inputs.fixed)
        );
        let forecast = Forecast::new(&again);
        let text = serde_json::to_string(&forecast).unwrap();
        let read: Forecast = serde_json::from_str(&text).unwrap();
        assert_eq!((read.convergent, read.advice.len()), (forecast.convergent, forecast.advice.len()));
    }
}
