//! The rows of the bench's table.
#![allow(clippy::print_stdout)]

use serde_json::{Value, json};

use super::MEMORY_MIB;
use super::content::Load;
use super::pair::{Machines, Pair, Sample};
use crate::Failure;
use crate::lab::rdma::way::Way;

/// Migrations of one kind.
pub(super) struct Row {
    pair: Pair,
    way: Way,
    load: Load,
    samples: Vec<Sample>,
    pub(super) failures: Vec<Failure>,
}

impl Row {
    pub(super) fn new(pair: Pair, way: Way, load: Load) -> Self {
        Self { pair, way, load, samples: Vec::new(), failures: Vec::new() }
    }

    /// Runs one more migration and adds its results.
    pub(super) fn repeat(&mut self, machines: &mut Machines, check: bool) {
        let [chunk, _] = self.way.chunks_mib;
        let about = format!("{}, {} MiB, {}, {}", self.pair.name(), chunk, self.mode(), self.load.name());
        match machines.run(self.pair, self.way, check) {
            Ok(sample) => {
                println!("LAB {about}: {:.1} MiB/s", MEMORY_MIB as f64 / sample.seconds);
                self.samples.push(sample);
            }
            Err(why) => {
                println!("LAB {about}: FAILED: {why}");
                self.failures.push(why);
            }
        }
    }

    fn mode(&self) -> String {
        self.way.registration()
    }

    fn of(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(&self.samples.iter().map(figure).collect::<Vec<_>>())
    }

    pub(super) fn line(&self, limit: f64) -> String {
        let (seconds, [chunk, _]) = (self.of(|sample| sample.seconds), self.way.chunks_mib);
        let speed = MEMORY_MIB as f64 / seconds;
        format!(
            "{:15} {chunk:5} MiB {:28} {:28} {speed:6.1} MiB/s ({:4.2} of the raw loop), CPU {:4.2} + {:4.2} s",
            self.pair.name(),
            self.mode(),
            self.load.name(),
            speed / limit,
            self.of(|sample| sample.source_cpu),
            self.of(|sample| sample.destination_cpu),
        )
    }

    pub(super) fn json(&self) -> Value {
        let seconds = self.of(|sample| sample.seconds);
        let last = self.samples.last().cloned().unwrap_or_default();
        json!({
            "pair": self.pair.name(),
            "chunk_mib": self.way.chunks_mib[0],
            "mode": self.mode(),
            "load": self.load.name(),
            "mib_s": MEMORY_MIB as f64 / seconds,
            "seconds": seconds,
            "all_seconds": self.samples.iter().map(|sample| sample.seconds).collect::<Vec<_>>(),
            "source_cpu_s": self.of(|sample| sample.source_cpu),
            "destination_cpu_s": self.of(|sample| sample.destination_cpu),
            "writes": last.source["writes"],
            "registrations": last.source["registrations"],
            "destination_registrations": last.destination["registrations"],
            "exchanges": last.source["exchanges"],
            "pinned_bytes": last.pinned_bytes,
            "failures": self.failures,
        })
    }
}

/// Median of the values: the mean of the middle two, or NaN without values.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
