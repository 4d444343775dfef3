//! Axes: ticks at round numbers, labelled in one unit that suits the axis's length.

/// A range from 0 and its ticks.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// The end of the axis, in the value's own unit; above 0.
    pub end: f64,
    /// Each tick's value and what stands beside it.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Time from 0 to `end` seconds; ends where the data end.
    pub fn time(end: f64) -> Self {
        let end = positive(end);
        let (scale, unit) = match end {
            e if e < 2e-3 => (1e6, "µs"),
            e if e < 2.0 => (1e3, "ms"),
            e if e < 300.0 => (1.0, "s"),
            _ => (1.0 / 60.0, "min"),
        };
        Self { end, ticks: ticks(end, scale, 10.0, unit) }
    }

    /// Bytes, or bytes per second with `per` = "/s", from 0 to just above `most`.
    pub fn bytes(most: f64, per: &str) -> Self {
        let most = positive(most);
        let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
        let power = ((most.log2() / 10.0).floor().max(0.0) as usize).min(units.len() - 1);
        let scale = 1.0 / 1024f64.powi(power as i32);
        let step = step(most * scale, 4.0);
        let end = (most * scale / step).ceil().max(1.0) * step / scale;
        Self { end, ticks: ticks(end, scale, 4.0, &format!("{}{per}", units[power])) }
    }

    /// A decimal amount such as a link's rate from 0 to `end`; ends there. `unit` stands behind the prefix.
    pub fn decimal(end: f64, unit: &str) -> Self {
        let end = positive(end);
        let prefixes = ["", "k", "M", "G", "T", "P", "E"];
        let power = ((end.log10() / 3.0).floor().max(0.0) as usize).min(prefixes.len() - 1);
        let scale = 1.0 / 1000f64.powi(power as i32);
        Self { end, ticks: ticks(end, scale, 8.0, &format!("{}{unit}", prefixes[power])) }
    }

    /// Where `value` lies between 0 and 1.
    pub fn at(&self, value: f64) -> f64 {
        (value / self.end).clamp(0.0, 1.0)
    }
}

fn positive(value: f64) -> f64 {
    if value.is_finite() && value > 0.0 { value } else { 1e-3 }
}

/// 1, 2 or 5 times a power of ten, so that about `wanted` steps make up `length`.
fn step(length: f64, wanted: f64) -> f64 {
    let rough = length / wanted;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * power >= rough * 0.999).unwrap_or(10.0);
    factor * power
}

fn ticks(end: f64, scale: f64, wanted: f64, unit: &str) -> Vec<(f64, String)> {
    let step = step(end * scale, wanted);
    let decimals = (-step.log10().floor()).max(0.0) as usize;
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
    fn axis_of_nothing_is_not_empty() {
        for nothing in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Axis::time(nothing).end > 0.0);
            assert!(Axis::bytes(nothing, "").end.is_finite());
        }
    }
}
