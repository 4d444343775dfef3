//! Timings of one measurement, and their summary.

use std::fmt;
use std::time::{Duration, Instant};

use sterna_benches::clock::CpuClock;

/// One timing of a piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub bytes: u64,
    pub took: Duration,
    /// CPU time of the whole process in that time.
    pub cpu: Duration,
}

/// Times `work`, which handles `bytes` bytes.
pub fn time<E>(bytes: u64, work: impl FnOnce() -> Result<(), E>) -> Result<Sample, E> {
    let (cpu, began) = (CpuClock::own().read(), Instant::now());
    work()?;
    Ok(Sample { bytes, took: began.elapsed(), cpu: CpuClock::own().read().saturating_sub(cpu) })
}

pub struct Series {
    name: &'static str,
    samples: Vec<Sample>,
}

impl Series {
    pub fn new(name: &'static str) -> Self {
        Self { name, samples: Vec::new() }
    }

    pub fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// Median of the ratios of this series' speed to the other's, pair by pair.
    pub fn speed_ratio(&self, other: &Self) -> f64 {
        let pairs = self.samples.iter().zip(&other.samples);
        median(pairs.map(|(a, b)| speed(a) / speed(b)).collect())
    }

    pub fn json(&self) -> serde_json::Value {
        let samples = self.samples.iter();
        serde_json::json!({
            "name": self.name,
            "bytes_per_second": samples.clone().map(speed).collect::<Vec<_>>(),
            "cpu_seconds_per_gib": samples.map(cpu_per_gib).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let speeds: Vec<f64> = self.samples.iter().map(|s| speed(s) / 1e9).collect();
        let least = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let most = speeds.iter().copied().fold(0.0, f64::max);
        write!(
            f,
            "{:<12} {:>6.2} GB/s ({least:.2} to {most:.2}), {:.2} CPU s/GiB",
            self.name,
            median(speeds),
            median(self.samples.iter().map(cpu_per_gib).collect())
        )
    }
}

fn speed(sample: &Sample) -> f64 {
    sample.bytes as f64 / sample.took.as_secs_f64()
}

fn cpu_per_gib(sample: &Sample) -> f64 {
    sample.cpu.as_secs_f64() / (sample.bytes as f64 / f64::from(1 << 30))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}
