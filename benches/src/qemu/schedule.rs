//! Divides the available time among the groups.

use std::time::{Duration, Instant};

use crate::figures::Table;
use crate::group::{Group, Limits};
use crate::output;

/// Limit of repetitions of a less important group.
const BESIDE: usize = 3;

/// Share of time and repetitions that a group gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Importance {
    /// Every setting, all repetitions.
    Main,
    /// Few settings, few repetitions.
    Beside,
}

impl Importance {
    /// Weight of the group when the time is divided.
    fn weight(self) -> u32 {
        match self {
            Self::Main => 4,
            Self::Beside => 1,
        }
    }
}

/// Divides the remaining time among the remaining groups.
pub struct Schedule {
    end: Instant,
    weight_left: u32,
    repetitions: usize,
    warms_up: bool,
    /// Parts of rows' names; empty: all rows.
    rows: Vec<String>,
}

impl Schedule {
    /// Plans to run `groups` within `limit`.
    pub fn new(limit: Duration, repetitions: usize, warms_up: bool, groups: &[Importance]) -> Self {
        let weight_left = groups.iter().map(|group| group.weight()).sum();
        Self { end: Instant::now() + limit, weight_left, repetitions, warms_up, rows: Vec::new() }
    }

    /// Restricts the run to rows whose name contains one of `rows`. An empty list has no effect.
    pub fn only(self, rows: &[String]) -> Self {
        Self { rows: rows.to_vec(), ..self }
    }

    /// Runs the next group and prints its tables.
    pub fn run(&mut self, mut group: Group<'_>, importance: Importance) -> Vec<Table> {
        if !self.rows.is_empty() {
            group.retain(|name| self.rows.iter().any(|row| name.contains(row.as_str())));
        }
        let weight = importance.weight();
        let now = Instant::now();
        let left = self.end.saturating_duration_since(now);
        let share = left * weight / self.weight_left.max(weight);
        let repetitions = match importance {
            Importance::Main => self.repetitions,
            Importance::Beside => self.repetitions.min(BESIDE),
        };
        // The last group must end in time. An earlier group may use up to twice its share, because later
        // groups can make up for it.
        let end = (now + 2 * share).min(self.end.max(now + share));
        let tables = group.run(Limits { repetitions, warms_up: self.warms_up, until: now + share, end });
        self.weight_left = self.weight_left.saturating_sub(weight);
        tables.iter().for_each(|table| print!("{}", output::terminal(table)));
        tables
    }
}
