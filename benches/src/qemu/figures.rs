//! Timings, and their summary.

use std::time::Duration;

use serde_json::{Value, json};

/// One timing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// From the operator's command until the machines report the end.
    pub took: Duration,
    /// Until the written data is also on the disk. Sterna reports the end only then.
    pub durable: Option<Duration>,
    /// CPU time of all processes that took part.
    pub cpu: Duration,
    /// The guest's downtime, as the source reports it.
    pub downtime: Option<Duration>,
    /// Space that the image occupies, in bytes.
    pub image_bytes: Option<u64>,
}

impl Sample {
    /// The time that is compared, in seconds.
    fn whole(&self) -> f64 {
        self.durable.unwrap_or(self.took).as_secs_f64()
    }
}

/// The program or limit that a row measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Qemu,
    Sterna,
    /// Sterna's command together with a QEMU.
    Tool,
    /// A limit of the machine.
    Limit,
    /// Only reported: not compared with the best, and not itself the best.
    Aside,
}

/// Repetitions of one measurement.
#[derive(Debug, Clone)]
pub struct Row {
    pub name: String,
    pub kind: Kind,
    /// The row is compared with the best of QEMU's rows whose name contains this.
    pub rival: &'static str,
    pub samples: Vec<Sample>,
    /// The reason why there are no samples, or no more.
    pub stopped: Option<String>,
}

/// Rows that are compared with each other.
pub struct Table {
    pub title: String,
    pub rows: Vec<Row>,
}

/// Minimum, median, maximum.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    pub least: f64,
    pub median: f64,
    pub most: f64,
}

impl Row {
    pub fn new(name: impl Into<String>, kind: Kind) -> Self {
        Self { name: name.into(), kind, rival: "", samples: Vec::new(), stopped: None }
    }

    /// The same row, compared only with QEMU's rows of one form.
    pub fn against(mut self, rival: &'static str) -> Self {
        self.rival = rival;
        self
    }

    /// The seconds that are compared.
    pub fn seconds(&self) -> Option<Spread> {
        spread(self.samples.iter().map(Sample::whole))
    }

    /// Seconds until the machine reported the end.
    pub fn reported_seconds(&self) -> Option<Spread> {
        spread(self.samples.iter().map(|sample| sample.took.as_secs_f64()))
    }

    pub fn cpu_seconds(&self) -> Option<Spread> {
        spread(self.samples.iter().map(|sample| sample.cpu.as_secs_f64()))
    }

    pub fn downtime_ms(&self) -> Option<Spread> {
        spread(self.samples.iter().filter_map(|sample| sample.downtime).map(|time| time.as_secs_f64() * 1e3))
    }

    fn image_mib(&self) -> Option<Spread> {
        spread(self.samples.iter().filter_map(|s| s.image_bytes).map(|bytes| bytes as f64 / 1048576.0))
    }

    fn json(&self) -> Value {
        let of = |value: fn(&Sample) -> Value| self.samples.iter().map(value).collect::<Vec<_>>();
        json!({
            "name": self.name,
            "kind": format!("{:?}", self.kind).to_lowercase(),
            "seconds_reported": of(|s| s.took.as_secs_f64().into()),
            "seconds_durable": of(|s| s.durable.map(|time| time.as_secs_f64()).into()),
            "cpu_seconds": of(|s| s.cpu.as_secs_f64().into()),
            "downtime_ms": of(|s| s.downtime.map(|time| time.as_secs_f64() * 1e3).into()),
            "image_mib": self.image_mib().map(|mib| mib.median),
            "skipped": self.stopped,
        })
    }
}

impl Table {
    /// QEMU's fastest row among those whose name contains `form`.
    pub fn best_of_qemu(&self, form: &str) -> Option<&Row> {
        self.fastest(|row| row.kind == Kind::Qemu && row.name.contains(form))
    }

    /// The fastest of the limits.
    pub fn limit(&self) -> Option<&Row> {
        self.fastest(|row| row.kind == Kind::Limit)
    }

    /// Sterna's fastest row.
    pub fn best_of_sterna(&self) -> Option<&Row> {
        self.fastest(|row| row.kind == Kind::Sterna)
    }

    pub fn json(&self) -> Value {
        json!({"title": self.title, "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>()})
    }

    fn fastest(&self, wanted: impl Fn(&Row) -> bool) -> Option<&Row> {
        let rows = self.rows.iter().filter(|row| wanted(row));
        let timed = rows.filter_map(|row| Some((row.seconds()?.median, row)));
        timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, row)| row)
    }
}

/// Speed of `row` as a multiple of `other`'s: the median of the repetitions' ratios.
pub fn times_as_fast(row: &Row, other: &Row) -> Option<f64> {
    let pairs = row.samples.iter().zip(&other.samples);
    spread(pairs.map(|(row, other)| other.whole() / row.whole())).map(|ratio| ratio.median)
}

fn spread(values: impl Iterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (least, most) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    let median = if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    };
    Some(Spread { least, median, most })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kind: Kind, seconds: &[u64]) -> Row {
        let sample = |seconds: &u64| Sample { took: Duration::from_secs(*seconds), ..Sample::default() };
        Row { samples: seconds.iter().map(sample).collect(), ..Row::new("row", kind) }
    }

    #[test]
    fn times_as_fast_compares_repetition_by_repetition() {
        let ratio = times_as_fast(&row(Kind::Sterna, &[1, 2, 10]), &row(Kind::Qemu, &[2, 6, 10]));

        assert_eq!(ratio, Some(2.0));
    }

    #[test]
    fn best_of_qemu_is_its_fastest_median_and_no_other_sides() {
        let rows = vec![row(Kind::Qemu, &[5]), row(Kind::Qemu, &[1, 3, 9]), row(Kind::Aside, &[1])];

        let table = Table { title: String::new(), rows };

        assert_eq!(table.best_of_qemu("").and_then(Row::seconds).map(|it| it.median), Some(3.0));
        assert!(table.best_of_sterna().is_none());
    }

    #[test]
    fn durable_time_is_the_one_that_is_compared() {
        let mut row = row(Kind::Qemu, &[1]);
        row.samples[0].durable = Some(Duration::from_secs(4));

        assert_eq!(row.seconds().map(|it| it.median), Some(4.0));
        assert_eq!(row.reported_seconds().map(|it| it.median), Some(1.0));
    }
}
