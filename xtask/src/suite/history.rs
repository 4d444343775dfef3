//! Durations of jobs, kept between runs, so that the longest jobs start first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::rules;

/// Durations in seconds by the jobs' names.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl History {
    /// Reads the durations of earlier runs. An unreadable file counts as an empty one.
    pub fn read(directory: &Path) -> Self {
        let path = directory.join("durations.json");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        let pairs = value.as_object().into_iter().flatten();
        let pairs = pairs.filter_map(|(name, seconds)| Some((name.clone(), seconds.as_f64()?)));
        Self { path, seconds: pairs.collect() }
    }

    /// The expected duration of the job, in seconds.
    pub fn expected(&self, name: &str) -> f64 {
        let known =
            || rules::LONG.iter().find(|(long, _)| *long == name).map_or(1.0, |(_, seconds)| *seconds);
        self.seconds.get(name).copied().unwrap_or_else(known)
    }

    pub fn note(&mut self, name: &str, took: Duration) {
        self.seconds.insert(name.to_owned(), (took.as_secs_f64() * 10.0).round() / 10.0);
    }

    /// Stores the durations. A failure is ignored, because the next run works without them.
    pub fn write(&self) {
        let _ = std::fs::write(&self.path, format!("{:#}\n", json!(self.seconds)));
    }
}
