//! Things that are timed together: one repetition times each of them once, in turn, so that a noisy
//! neighbour hits all alike. The first repetition only warms up, and checks that what arrives is what left.

use std::time::{Duration, Instant};

use crate::Failure;
use crate::figures::{Row, Sample, Table};

/// Times one thing; true: look whether it was done right, too. Gives a sample for each of the tables.
type Run<'a> = Box<dyn Fn(bool) -> Result<Vec<Sample>, Failure> + 'a>;

/// Tables that have the same rows, each filled by one function.
pub struct Group<'a> {
    tables: Vec<Table>,
    runs: Vec<Run<'a>>,
}

/// How long a group may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub repetitions: usize,
    /// Whether one more repetition comes first, which does not count and looks at what arrived.
    pub warms_up: bool,
    /// No further repetition begins after it, once there is one.
    pub until: Instant,
    /// Nothing at all begins after it.
    pub end: Instant,
}

impl<'a> Group<'a> {
    pub fn new(titles: Vec<String>) -> Self {
        let tables = titles.into_iter().map(|title| Table { title, rows: Vec::new() });
        Self { tables: tables.collect(), runs: Vec::new() }
    }

    /// Adds a row to every table.
    pub fn row(&mut self, row: &Row, run: impl Fn(bool) -> Result<Vec<Sample>, Failure> + 'a) {
        self.tables.iter_mut().for_each(|table| table.rows.push(row.clone()));
        self.runs.push(Box::new(run));
    }

    /// Drops the rows whose name is not wanted.
    pub fn retain(&mut self, is_wanted: impl Fn(&str) -> bool) {
        let Some(first) = self.tables.first() else { return };
        let wanted: Vec<bool> = first.rows.iter().map(|row| is_wanted(&row.name)).collect();
        let mut runs = wanted.iter();
        self.runs.retain(|_| runs.next() == Some(&true));
        for table in &mut self.tables {
            let mut rows = wanted.iter();
            table.rows.retain(|_| rows.next() == Some(&true));
        }
    }

    /// Times everything.
    pub fn run(mut self, limits: Limits) -> Vec<Table> {
        let began = Instant::now();
        for repetition in usize::from(!limits.warms_up)..=limits.repetitions {
            // The warm-up and one repetition make figures, if not good ones.
            if repetition > 1 && Instant::now() > limits.until {
                break;
            }
            for (number, run) in self.runs.iter().enumerate() {
                let name = self.tables[0].rows[number].name.clone();
                if self.tables[0].rows[number].stopped.is_some() {
                    continue;
                }
                if Instant::now() > limits.end {
                    if self.tables[0].rows[number].samples.is_empty() {
                        stop(&mut self.tables, number, "no time is left");
                    }
                    continue;
                }
                progress(began.elapsed(), repetition, limits.repetitions, &name);
                match run(repetition == 0) {
                    Ok(samples) if repetition > 0 => {
                        let rows = self.tables.iter_mut().map(|table| &mut table.rows[number]);
                        rows.zip(samples).for_each(|(row, sample)| row.samples.push(sample));
                    }
                    Ok(_) => {}
                    Err(why) => stop(&mut self.tables, number, &why),
                }
            }
        }
        progress_ends();
        self.tables
    }
}

/// A row that is not timed any more.
fn stop(tables: &mut [Table], number: usize, why: &str) {
    skipped(&tables[0].rows[number].name, why);
    for table in tables {
        table.rows[number].stopped = Some(why.to_owned());
    }
}

/// Says that something cannot be timed, and why.
#[allow(clippy::print_stderr, reason = "xtask collects these lines")]
pub fn skipped(what: &str, why: &str) {
    progress_ends();
    eprintln!("SKIPPED {what}: {why}");
}

#[allow(clippy::print_stderr, reason = "a bench says what it is doing")]
fn progress(since: Duration, repetition: usize, of: usize, what: &str) {
    eprint!("\r\x1b[K{:>5.0} s, repetition {repetition} of {of}: {what}", since.as_secs_f64());
}

#[allow(clippy::print_stderr, reason = "a bench says what it is doing")]
fn progress_ends() {
    eprint!("\r\x1b[K");
}
