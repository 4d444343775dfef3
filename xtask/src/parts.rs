//! Parts of a command: each prints its name, runs, prints its time, and is recorded for the closing
//! table.

use std::time::{Duration, Instant};

use crate::process::{Failure, Result};

/// The result of a part that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every step of the part passed.
    Passed,
    /// The steps that ran passed; the text names the steps that did not run.
    Partly(String),
    /// The part could not run here; the text gives the reason.
    Skipped(String),
}

/// The results of the parts so far, and the user's selection.
pub struct Parts {
    began: Instant,
    only: Vec<String>,
    done: Vec<(String, Duration, Result<Outcome>)>,
    notes: Vec<String>,
}

impl Default for Parts {
    fn default() -> Self {
        Self { began: Instant::now(), only: Vec::new(), done: Vec::new(), notes: Vec::new() }
    }
}

impl Parts {
    /// A list that runs only the parts named in `only`; all if it is empty.
    pub fn only(only: &[String]) -> Self {
        Self { only: only.to_vec(), ..Self::default() }
    }

    /// Whether the user selected this part.
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| wanted == name)
    }

    /// Runs one part, unless the user did not select it.
    pub fn part(&mut self, name: &str, body: impl FnOnce() -> Result<Outcome>) {
        if !self.wants(name) {
            return;
        }
        println!("\n==> {name}");
        let began = Instant::now();
        let result = body();
        let took = began.elapsed();
        println!("{}", closing_line(name, took, &result));
        self.done.push((name.to_owned(), took, result));
    }

    /// Records a part that ran elsewhere and printed its own lines.
    pub fn ended(&mut self, name: &str, took: Duration, result: Result<Outcome>) {
        self.done.push((name.to_owned(), took, result));
    }

    /// Adds a line to the closing table, for example a single test that was skipped.
    pub fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    /// Prints the results of all parts; returns an error if one failed.
    pub fn finish(self) -> std::result::Result<(), Failure> {
        println!();
        for (name, took, result) in &self.done {
            println!("{}", closing_line(name, *took, result));
        }
        for note in &self.notes {
            println!("    {note}");
        }
        let total = self.began.elapsed();
        let failed: Vec<&str> =
            self.done.iter().filter(|(_, _, r)| r.is_err()).map(|(name, _, _)| name.as_str()).collect();
        if failed.is_empty() {
            println!("all parts passed in {:.1} s", total.as_secs_f64());
            Ok(())
        } else {
            Err(Failure::Failed(format!("failed after {:.1} s: {}", total.as_secs_f64(), failed.join(", "))))
        }
    }
}

fn closing_line(name: &str, took: Duration, result: &Result<Outcome>) -> String {
    let seconds = took.as_secs_f64();
    match result {
        Ok(Outcome::Passed) => format!("  ok      {name:<10} {seconds:7.1} s"),
        Ok(Outcome::Partly(left_out)) => format!("  ok      {name:<10} {seconds:7.1} s  {left_out}"),
        Ok(Outcome::Skipped(why)) => format!("  SKIPPED {name:<10} {seconds:7.1} s  {why}"),
        Err(why) => format!("  FAILED  {name:<10} {seconds:7.1} s  {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finish_after_a_failed_part_names_it_and_ran_the_others() {
        let mut parts = Parts::default();
        let mut later_ran = false;

        parts.part("bad", || Err("broke".into()));
        parts.part("good", || {
            later_ran = true;
            Ok(Outcome::Passed)
        });

        let Err(Failure::Failed(why)) = parts.finish() else { panic!("must fail") };
        assert!(later_ran && why.contains("bad") && !why.contains("good"), "{why}");
    }

    #[test]
    fn closing_line_of_a_part_that_left_something_out_says_so() {
        let line = |outcome| closing_line("interop", Duration::ZERO, &Ok(outcome));

        assert!(line(Outcome::Partly("7 tests skipped".into())).ends_with("7 tests skipped"));
        assert!(line(Outcome::Skipped("no roots".into())).contains("SKIPPED"));
    }

    #[test]
    fn only_leaves_out_what_was_not_asked_for() {
        let mut parts = Parts::only(&["b".into()]);

        parts.part("a", || Err("must not run".into()));
        parts.part("b", || Ok(Outcome::Skipped("nothing there".into())));

        assert!(parts.finish().is_ok());
    }
}
