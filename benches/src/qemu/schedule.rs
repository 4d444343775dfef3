//! How the time that there is is divided.

use std::time::{Duration, Instant};

use crate::figures::Table;
use crate::group::{Group, Limits};
use crate::output;

/// Repetitions of what is timed beside.
const BESIDE: usize = 3;

/// How much time and how many repetitions a group gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Importance {
    /// Every setting, all repetitions.
    Main,
    /// Few settings, few repetitions.
    Beside,
}

impl Importance {
    /// Its share in the time, in relation to the others'.
    fn weight(self) -> u32 {
        match self {
            Self::Main => 4,
            Self::Beside => 1,
        }
    }
}

/// Divides the time that there is among the groups that are left.
pub struct Schedule {
    end: Instant,
    weight_left: u32,
    repetitions: usize,
    warms_up: bool,
    /// Parts of rows' names; empty: all rows.
    rows: Vec<String>,
}

impl Schedule {
    /// `groups` are to be run within `limit`.
    pub fn new(limit: Duration, repetitions: usize, warms_up: bool, groups: &[Importance]) -> Self {
        let weight_left = groups.iter().map(|group| group.weight()).sum();
        Self { end: Instant::now() + limit, weight_left, repetitions, warms_up, rows: Vec::new() }
    }

    /// Of all rows only those whose name contains one of `rows`, if there is any.
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
        // What is the last must not be late; before it, there is time to be made up.
        let end = (now + 2 * share).min(self.end.max(now + share));
        let tables = group.run(Limits { repetitions, warms_up: self.warms_up, until: now + share, end });
        self.weight_left = self.weight_left.saturating_sub(weight);
        tables.iter().for_each(|table| print!("{}", output::terminal(table)));
        tables
    }
}
