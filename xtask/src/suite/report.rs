//! The results of jobs, and the closing lines of a run.

use std::time::Duration;

use super::log::Counts;
use crate::parts::{Outcome, Parts};
use crate::process::Result;

/// How many of the slowest jobs the closing lines name.
const SLOWEST: usize = 10;

/// The result of a job that has ended.
#[derive(Debug)]
pub struct Done {
    pub part: &'static str,
    pub name: String,
    /// Time since the scheduler started.
    pub began: Duration,
    pub ended: Duration,
    pub cpu: Duration,
    pub counts: Counts,
    /// `SKIPPED name: reason`, and other lines for the closing lines.
    pub notes: Vec<String>,
    pub result: Result<()>,
}

impl Done {
    pub fn took(&self) -> Duration {
        self.ended.saturating_sub(self.began)
    }

    /// The line that is printed when the job ends.
    pub fn line(&self) -> String {
        let word = if self.result.is_ok() { "ok" } else { "FAILED" };
        let counts = match self.counts {
            Counts { passed: 0, failed: 0, skipped: 0 } => String::new(),
            Counts { passed, failed: 0, skipped: 0 } => format!("{passed} passed"),
            Counts { passed, failed, skipped } => {
                format!("{passed} passed, {failed} failed, {skipped} skipped")
            }
        };
        let (took, cpu) = (self.took().as_secs_f64(), self.cpu.as_secs_f64());
        let why = self.result.as_ref().err().map(|why| format!("  {why}")).unwrap_or_default();
        format!("  {word:<7} {:<34} {took:6.1} s ({cpu:5.1} s CPU)  {counts}{why}", self.name)
            .trim_end()
            .to_owned()
    }
}

/// The results of all jobs of a run.
#[derive(Debug, Default)]
pub struct Report(Vec<Done>);

impl Report {
    pub fn add(&mut self, done: Done) {
        self.0.push(done);
    }

    #[cfg(test)]
    pub fn into_jobs(self) -> Vec<Done> {
        self.0
    }

    /// Gives each part its line and its notes, and prints the slowest jobs and the sums.
    pub fn close(self, parts: &mut Parts) {
        let mut names: Vec<&'static str> = Vec::new();
        for done in &self.0 {
            if !names.contains(&done.part) {
                names.push(done.part);
            }
        }
        for name in names {
            let (took, result) = self.part(name);
            parts.ended(name, took, result);
        }
        let mut slowest: Vec<&Done> = self.0.iter().collect();
        slowest.sort_by_key(|done| std::cmp::Reverse(done.took()));
        println!("\nthe slowest:");
        slowest.iter().take(SLOWEST).for_each(|done| println!("{}", done.line()));
        let mut counts = Counts::default();
        self.0.iter().for_each(|done| counts.add(&done.counts));
        let Counts { passed, failed, skipped } = counts;
        println!("\n{passed} passed, {failed} failed, {skipped} skipped");
        for note in self.0.into_iter().flat_map(|done| done.notes) {
            parts.note(note);
        }
    }

    /// The part's time, from its first job's start to its last job's end, and its result.
    fn part(&self, name: &str) -> (Duration, Result<Outcome>) {
        let of = || self.0.iter().filter(|done| done.part == name);
        let began = of().map(|done| done.began).min().unwrap_or_default();
        let ended = of().map(|done| done.ended).max().unwrap_or_default();
        let failed: Vec<String> = of().filter_map(|done| done.failure()).collect();
        if !failed.is_empty() {
            return (ended - began, Err(failed.join("; ")));
        }
        let cpu: Duration = of().map(|done| done.cpu).sum();
        let mut counts = Counts::default();
        of().for_each(|done| counts.add(&done.counts));
        let mut text = format!("({:.1} s CPU)", cpu.as_secs_f64());
        if counts.passed > 0 {
            text.push_str(&format!("  {} passed", counts.passed));
        }
        let mut skips = of().flat_map(|done| &done.notes).filter_map(|note| note.strip_prefix("SKIPPED "));
        let first = skips.next();
        if let Some(first) = first {
            let skipped = 1 + skips.count();
            if counts.passed == 0 {
                return (ended - began, Ok(Outcome::Skipped(format!("{skipped} skipped: {first}"))));
            }
            text.push_str(&format!("  {skipped} skipped"));
        }
        (ended - began, Ok(Outcome::Partly(text)))
    }
}

impl Done {
    fn failure(&self) -> Option<String> {
        self.result.as_ref().err().map(|why| format!("{}: {why}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(part: &'static str, name: &str, seconds: (u64, u64), result: Result<()>) -> Done {
        let (began, ended) = (Duration::from_secs(seconds.0), Duration::from_secs(seconds.1));
        let counts = Counts { passed: 2, ..Counts::default() };
        let (cpu, notes) = (Duration::from_secs(1), Vec::new());
        Done { part, name: name.into(), began, ended, cpu, counts, notes, result }
    }

    #[test]
    fn part_lasts_from_its_first_job_to_its_last_and_fails_with_any() {
        let mut report = Report::default();
        report.add(done("a", "one", (3, 5), Ok(())));
        report.add(done("b", "two", (0, 9), Err("broke".into())));
        report.add(done("a", "three", (4, 8), Ok(())));

        let (took, result) = report.part("a");

        assert_eq!(took, Duration::from_secs(5));
        assert_eq!(result, Ok(Outcome::Partly("(2.0 s CPU)  4 passed".into())));
        assert_eq!(report.part("b").1, Err("two: broke".into()));
    }

    #[test]
    fn part_of_which_nothing_ran_was_skipped() {
        let mut report = Report::default();
        let all_skipped = Done { counts: Counts::default(), ..done("lab", "one", (0, 1), Ok(())) };
        report.add(Done { notes: vec!["SKIPPED it boots: no KVM".into()], ..all_skipped });

        assert_eq!(report.part("lab").1, Ok(Outcome::Skipped("1 skipped: it boots: no KVM".into())));
    }
}
