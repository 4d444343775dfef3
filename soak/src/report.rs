//! Results of all cases: how often each state suffered each blow, and the failures.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::drift::Drift;
use crate::schedule::{Blow, Case};
use crate::stop::Stop;

/// The result of a soak.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of cases by stop and blow.
    hits: BTreeMap<(Stop, Blow), u64>,
    /// Cases that failed, each with the reason.
    pub failures: Vec<(Case, String)>,
    /// Number of cases that were played.
    pub played: u64,
    /// Time from the first case to the last.
    pub took: Duration,
    /// Resources of the process early on and at the end.
    pub drift: Drift,
    /// Ctrl-C ended the soak.
    pub interrupted: bool,
}

impl Report {
    /// An empty report of a soak with `cases` cases.
    pub fn of(cases: u64) -> Self {
        Self { drift: Drift::over(cases), ..Self::default() }
    }

    /// Adds the result of a case.
    pub fn add(&mut self, case: Case, result: Result<(), String>) {
        self.played += 1;
        *self.hits.entry((case.stop, case.blow)).or_default() += 1;
        if let Err(why) = result {
            self.failures.push((case, why));
        }
    }

    /// Number of cases that passed.
    pub fn passed(&self) -> u64 {
        self.played - self.failures.len() as u64
    }

    /// How often each state was reached: the source's states, then the destination's.
    pub fn states(&self) -> [BTreeMap<&'static str, u64>; 2] {
        [0, 1].map(|side| {
            let mut states = BTreeMap::new();
            for (&(stop, _), &count) in &self.hits {
                let (source, destination) = stop.states();
                *states.entry(if side == 0 { source } else { destination }).or_default() += count;
            }
            states.remove("-");
            states
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:16} {:14} {:12}", "stop", "source", "destination")?;
        let blows: Vec<Blow> = match self.hits.keys().any(|(_, blow)| *blow == Blow::Silence) {
            true => vec![Blow::Silence],
            false => Blow::ALL.to_vec(),
        };
        for blow in &blows {
            write!(f, " {:>8}", blow.label())?;
        }
        writeln!(f, " {:>6}", "all")?;
        for &stop in Stop::ALL {
            let (source, destination) = stop.states();
            write!(f, "{:16} {source:14} {destination:12}", stop.label())?;
            let hits: Vec<u64> =
                blows.iter().map(|&blow| self.hits.get(&(stop, blow)).copied().unwrap_or(0)).collect();
            for hits in &hits {
                write!(f, " {hits:>8}")?;
            }
            writeln!(f, " {:>6}", hits.iter().sum::<u64>())?;
        }
        for (side, states) in ["source", "destination"].iter().zip(self.states()) {
            let states: Vec<_> = states.iter().map(|(state, count)| format!("{state} {count}")).collect();
            writeln!(f, "states of the {side}: {}", states.join(", "))?;
        }
        write!(f, "{}", self.drift)?;
        if self.interrupted {
            writeln!(f, "interrupted")?;
        }
        write!(
            f,
            "{} passed, {} failed ({:.1} s)",
            self.passed(),
            self.failures.len(),
            self.took.as_secs_f64()
        )
    }
}
