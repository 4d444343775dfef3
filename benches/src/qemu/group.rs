//! Measurements that are timed together. One repetition times each of them once, so that other load on the
//! host affects all of them equally. The first repetition only warms up, and checks that the received content
//! equals the sent one.

use std::time::{Duration, Instant};

use crate::Failure;
use crate::figures::{Row, Sample, Table};

/// Takes one timing and returns a sample for each table. The argument `true` also requests a check of the
/// result.
type Run<'a> = Box<dyn Fn(bool) -> Result<Vec<Sample>, Failure> + 'a>;

/// Tables that have the same rows. One function fills a row of each.
pub struct Group<'a> {
    tables: Vec<Table>,
    runs: Vec<Run<'a>>,
}

/// Time limits and repetitions of a group.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub repetitions: usize,
    /// Whether an additional first repetition runs, which does not count and checks the received content.
    pub warms_up: bool,
    /// No further repetition starts after this time, if there is one already.
    pub until: Instant,
    /// No measurement starts after this time.
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

    /// Runs all timings.
    pub fn run(mut self, limits: Limits) -> Vec<Table> {
        let began = Instant::now();
        for repetition in usize::from(!limits.warms_up)..=limits.repetitions {
            // The warm-up and one repetition are the minimum for a result.
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

/// Marks a row that is not timed any more.
fn stop(tables: &mut [Table], number: usize, why: &str) {
    skipped(&tables[0].rows[number].name, why);
    for table in tables {
        table.rows[number].stopped = Some(why.to_owned());
    }
}

/// Reports a measurement that cannot be timed, with the reason.
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
