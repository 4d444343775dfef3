//! Axes with ticks at round numbers, labelled in one unit that suits the axis's length.

use crate::units;

/// A range and its ticks.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// Start of the axis: 0, except for [`Axis::times`].
    pub start: f64,
    /// End of the axis, in the value's own unit; above 0.
    pub end: f64,
    /// Each tick's value and its label.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Time from 0 to `end` seconds. The axis ends at `end`.
    pub fn time(end: f64) -> Self {
        let end = positive(end);
        let (scale, unit) = time_unit(end);
        Self { start: 0.0, end, ticks: ticks(end, scale, 10.0, unit) }
    }

    /// Time between two instants, with ticks at round times in between.
    pub fn times(start: f64, end: f64) -> Self {
        let start = if start.is_finite() { start.max(0.0) } else { 0.0 };
        let length = positive(end - start);
        let (scale, unit) = time_unit(start + length);
        let step = step(length * scale, 8.0);
        let decimals = decimals(step);
        let first = (start * scale / step - 1e-6).ceil() as u64;
        let count = (((start + length) * scale / step + 1e-6).floor() as u64).saturating_sub(first).min(20);
        let tick = |number: u64| {
            let shown = number as f64 * step;
            (shown / scale, format!("{shown:.decimals$} {unit}"))
        };
        Self { start, end: start + length, ticks: (first..=first + count).map(tick).collect() }
    }

    /// Durations from 0 to just above `most` seconds, for a short axis.
    pub fn durations(most: f64) -> Self {
        let most = positive(most);
        let (scale, unit) = time_unit(most);
        let step = step(most * scale, 3.0);
        let end = (most * scale / step).ceil().max(1.0) * step / scale;
        Self { start: 0.0, end, ticks: ticks(end, scale, 3.0, unit) }
    }

    /// A count from 0 to at least `most`, with ticks at whole numbers.
    pub fn count(most: u64) -> Self {
        let step = step(most.max(1) as f64, 3.0).max(1.0);
        let count = (most.max(1) as f64 / step).ceil() as u64;
        let ticks =
            (0..=count).map(|number| (number as f64 * step, units::count((number as f64 * step) as u64)));
        Self { start: 0.0, end: count as f64 * step, ticks: ticks.collect() }
    }

    /// Bytes, or bytes per second with `per` = "/s", from 0 to just above `most`.
    pub fn bytes(most: f64, per: &str) -> Self {
        let most = positive(most);
        let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
        let power = ((most.log2() / 10.0).floor().max(0.0) as usize).min(units.len() - 1);
        let scale = 1.0 / 1024f64.powi(power as i32);
        let step = step(most * scale, 4.0);
        let end = (most * scale / step).ceil().max(1.0) * step / scale;
        Self { start: 0.0, end, ticks: ticks(end, scale, 4.0, &format!("{}{per}", units[power])) }
    }

    /// A decimal amount, such as a link's rate, from 0 to `end`. `unit` follows the prefix.
    pub fn decimal(end: f64, unit: &str) -> Self {
        let end = positive(end);
        let prefixes = ["", "k", "M", "G", "T", "P", "E"];
        let power = ((end.log10() / 3.0).floor().max(0.0) as usize).min(prefixes.len() - 1);
        let scale = 1.0 / 1000f64.powi(power as i32);
        Self { start: 0.0, end, ticks: ticks(end, scale, 8.0, &format!("{}{unit}", prefixes[power])) }
    }

    /// Position of `value`: 0 at the start, 1 at the end.
    pub fn at(&self, value: f64) -> f64 {
        ((value - self.start) / (self.end - self.start)).clamp(0.0, 1.0)
    }
}

fn time_unit(end: f64) -> (f64, &'static str) {
    match end {
        e if e < 2e-3 => (1e6, "µs"),
        e if e < 2.0 => (1e3, "ms"),
        e if e < 300.0 => (1.0, "s"),
        _ => (1.0 / 60.0, "min"),
    }
}

fn decimals(step: f64) -> usize {
    (-step.log10().floor()).max(0.0) as usize
}

fn positive(value: f64) -> f64 {
    if value.is_finite() && value > 0.0 { value } else { 1e-3 }
}

/// 1, 2 or 5 times a power of ten, so that `length` has about `wanted` steps.
fn step(length: f64, wanted: f64) -> f64 {
    let rough = length / wanted;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * power >= rough * 0.999).unwrap_or(10.0);
    factor * power
}

fn ticks(end: f64, scale: f64, wanted: f64, unit: &str) -> Vec<(f64, String)> {
    let step = step(end * scale, wanted);
    let decimals = decimals(step);
    let count = (end * scale / step + 1e-6).floor() as usize;
    (0..=count)
        .map(|number| {
            let shown = number as f64 * step;
            let label = if number == 0 { "0".into() } else { format!("{shown:.decimals$} {unit}") };
            (shown / scale, label)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_axis_has_round_ticks_inside_its_end() {
        for end in [1e-5, 0.0123, 0.5, 2.35, 17.0, 299.0, 4000.0] {
            let axis = Axis::time(end);

            assert_eq!(axis.end, end);
            assert!((5..=11).contains(&axis.ticks.len()), "{end}: {:?}", axis.ticks);
            assert!(axis.ticks.iter().all(|(value, _)| *value <= end * 1.001));
        }
        assert_eq!(Axis::time(2.35).ticks[1].1, "0.5 s");
    }

    #[test]
    fn byte_axis_reaches_over_the_data_in_one_unit() {
        let axis = Axis::bytes(2.1e9, "/s");

        assert!(axis.end >= 2.1e9 && axis.end < 4.2e9);
        assert!(axis.ticks[1..].iter().all(|(_, label)| label.ends_with(" GiB/s")), "{:?}", axis.ticks);
        assert!(axis.ticks.len() <= 6);
    }

    #[test]
    fn decimal_axis_has_round_ticks_in_one_unit() {
        let axis = Axis::decimal(15.75e9, "B/s");

        assert_eq!(axis.end, 15.75e9);
        assert!((axis.ticks[1].0 - 2e9).abs() < 1.0);
        assert_eq!(axis.ticks[1].1, "2 GB/s");
    }

    #[test]
    fn axis_between_two_instants_has_round_ticks_between_them() {
        let axis = Axis::times(3.19, 3.94);

        assert_eq!((axis.start, axis.ticks[0].1.as_str()), (3.19, "3.2 s"));
        assert!((axis.end - 3.94).abs() < 1e-9 && (5..=10).contains(&axis.ticks.len()), "{axis:?}");
        assert!(axis.ticks.iter().all(|(value, _)| (3.19..=3.941).contains(value)), "{axis:?}");
        assert_eq!((axis.at(3.19), axis.at(3.94), axis.at(9.0)), (0.0, 1.0, 1.0));
    }

    #[test]
    fn axis_of_durations_reaches_over_the_data_with_few_ticks() {
        for most in [3e-6, 0.0042, 0.05, 1.9, 70.0, 5000.0] {
            let axis = Axis::durations(most);

            assert!(axis.end >= most && (2..=7).contains(&axis.ticks.len()), "{most}: {axis:?}");
        }
        assert_eq!(Axis::durations(0.0042).ticks[1].1, "2 ms");
    }

    #[test]
    fn count_axis_has_whole_numbers_and_reaches_over_the_most() {
        for most in [0, 1, 2, 7, 700, 12_345, u64::MAX] {
            let axis = Axis::count(most);

            assert!(axis.end >= most as f64 && (2..=7).contains(&axis.ticks.len()), "{most}: {axis:?}");
            assert!(axis.ticks.iter().all(|(value, _)| value.fract() == 0.0), "{most}: {axis:?}");
        }
        assert_eq!(Axis::count(700).ticks[2].1, "1\u{202f}000");
    }

    #[test]
    fn axis_of_nothing_is_not_empty() {
        for nothing in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Axis::time(nothing).end > 0.0);
            assert!(Axis::bytes(nothing, "").end.is_finite());
            let times = Axis::times(nothing, nothing);
            assert!(times.end > times.start && times.ticks.len() <= 21, "{times:?}");
        }
    }
}
