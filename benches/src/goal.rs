//! Compares measured values with goals.

use std::fmt::Write as _;

/// A line of a table of goals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Goal {
    /// Name of the measured value.
    pub what: String,
    /// The result, as text.
    pub measured: String,
    /// The goal, as text.
    pub goal: String,
    /// Whether the goal is missed.
    pub is_short: bool,
}

/// The goal for a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// At most this number.
    AtMost(f64),
    /// At least this number.
    AtLeast(f64),
    /// No goal is set; the value is only reported.
    Stated,
}

impl Bound {
    /// Whether `value` misses the goal. NaN always misses it.
    pub fn is_missed_by(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value.is_nan() || value > limit,
            Self::AtLeast(limit) => value.is_nan() || value < limit,
            Self::Stated => false,
        }
    }

    /// The bound as text for a table.
    pub fn text(self) -> String {
        match self {
            Self::AtMost(limit) => format!("≤ {limit}"),
            Self::AtLeast(limit) => format!("≥ {limit}"),
            Self::Stated => "stated".to_owned(),
        }
    }
}

impl Goal {
    /// A goal for one number. `beside` lists the values that it was computed from.
    pub fn of(what: &str, value: f64, beside: &str, bound: Bound) -> Self {
        let beside = if beside.is_empty() { String::new() } else { format!(" ({beside})") };
        Self {
            what: what.to_owned(),
            measured: format!("{}{beside}", figure(value)),
            goal: bound.text(),
            is_short: bound.is_missed_by(value),
        }
    }
}

/// Formats a number with a useful number of digits.
pub fn figure(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// The table of goals, in Markdown.
pub fn table(goals: &[Goal]) -> String {
    let mut text = "| what | measured | goal |\n| --- | --- | --- |\n".to_owned();
    for goal in goals {
        let short = if goal.is_short { ", **short**" } else { "" };
        // Writing to a string never fails.
        let _ = writeln!(text, "| {} | {}{short} | {} |", goal.what, goal.measured, goal.goal);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goal_that_is_not_reached_or_not_measured_is_short() {
        let short = |value, bound| Goal::of("x", value, "", bound).is_short;
        assert!(!short(1.0, Bound::AtMost(1.0)) && short(1.01, Bound::AtMost(1.0)));
        assert!(!short(0.9, Bound::AtLeast(0.9)) && short(0.89, Bound::AtLeast(0.9)));
        assert!(short(f64::NAN, Bound::AtMost(1.0)) && short(f64::NAN, Bound::AtLeast(1.0)));
        assert!(!short(f64::NAN, Bound::Stated));
        let goals = [Goal::of("p50", 0.7, "70 µs, QEMU 100", Bound::AtMost(0.5))];
        assert_eq!(table(&goals).lines().nth(2), Some("| p50 | 0.70 (70 µs, QEMU 100), **short** | ≤ 0.5 |"));
    }
}
