//! How long each job took, kept between runs, so that the longest begin first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::rules;

/// Durations by the jobs' names.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl History {
    /// Those of earlier runs; a file that cannot be read is as good as none.
    pub fn read(directory: &Path) -> Self {
        let path = directory.join("durations.json");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        let pairs = value.as_object().into_iter().flatten();
        let pairs = pairs.filter_map(|(name, seconds)| Some((name.clone(), seconds.as_f64()?)));
        Self { path, seconds: pairs.collect() }
    }

    /// What the job is expected to take, in seconds.
    pub fn expected(&self, name: &str) -> f64 {
        let known =
            || rules::LONG.iter().find(|(long, _)| *long == name).map_or(1.0, |(_, seconds)| *seconds);
        self.seconds.get(name).copied().unwrap_or_else(known)
    }

    pub fn note(&mut self, name: &str, took: Duration) {
        self.seconds.insert(name.to_owned(), (took.as_secs_f64() * 10.0).round() / 10.0);
    }

    /// Keeps them; the next run does without if that fails.
    pub fn write(&self) {
        let _ = std::fs::write(&self.path, format!("{:#}\n", json!(self.seconds)));
    }
}
