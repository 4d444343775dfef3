//! Timings of several ways to do the same work, repetition by repetition.

use std::fmt;
use std::time::{Duration, Instant};

/// The timings of one part of the bench.
pub struct Table {
    title: String,
    rows: Vec<(&'static str, Vec<Duration>)>,
    /// Ratios to print: name of the row, and of the row that it is divided by.
    ratios: Vec<(&'static str, &'static str)>,
}

impl Table {
    pub fn new(title: impl Into<String>) -> Self {
        Table { title: title.into(), rows: Vec::new(), ratios: Vec::new() }
    }

    /// Adds a timing to a row.
    pub fn push(&mut self, name: &'static str, took: Duration) {
        match self.rows.iter_mut().find(|row| row.0 == name) {
            Some(row) => row.1.push(took),
            None => self.rows.push((name, vec![took])),
        }
    }

    /// Prints the median of `of / to` with the table.
    pub fn tell(&mut self, of: &'static str, to: &'static str) {
        self.ratios.push((of, to));
    }

    fn took(&self, name: &str) -> &[Duration] {
        self.rows.iter().find(|row| row.0 == name).map_or(&[], |row| &row.1)
    }

    fn ratio(&self, of: &str, to: &str) -> f64 {
        let pairs = self.took(of).iter().zip(self.took(to));
        median(pairs.map(|(of, to)| of.as_secs_f64() / to.as_secs_f64()).collect())
    }

    pub fn json(&self) -> serde_json::Value {
        let seconds = |took: &[Duration]| took.iter().map(Duration::as_secs_f64).collect::<Vec<_>>();
        let rows = self.rows.iter().map(|(name, took)| {
            serde_json::json!({ "name": name, "median": median(seconds(took)), "seconds": seconds(took) })
        });
        let ratios = self
            .ratios
            .iter()
            .map(|(of, to)| serde_json::json!({ "of": of, "to": to, "median": self.ratio(of, to) }));
        serde_json::json!({
            "title": self.title,
            "rows": rows.collect::<Vec<_>>(),
            "ratios": ratios.collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.rows.iter().map(|row| row.1.len()).max().unwrap_or(0);
        writeln!(f, "{}; medians of {runs}", self.title)?;
        for (name, took) in &self.rows {
            let ms: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1e3).collect();
            let least = ms.iter().copied().fold(f64::INFINITY, f64::min);
            let most = ms.iter().copied().fold(0.0, f64::max);
            writeln!(f, "  {name:<44} {:>9.3} ms ({least:.3} to {most:.3})", median(ms))?;
        }
        for (of, to) in &self.ratios {
            writeln!(f, "  {of} / {to}: {:.2}", self.ratio(of, to))?;
        }
        Ok(())
    }
}

/// Duration of `work`, and its result.
pub fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let began = Instant::now();
    let result = work();
    (began.elapsed(), result)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}
