//! Tests that failed beside others run again, alone.
//!
//! On a busy machine, a test may fail because of a rare order of threads. Then the failure says
//! nothing about the commit. A test that passes several times alone is reported as `UNSTABLE`, and
//! the command continues. An unstable test is still a defect, of the test or of the program
//! (CONTRIBUTING.md). `STERNA_STRICT=1` switches this off.

use std::process::Command;

use super::{Beside, Done, Job, log};

/// Most tests of a run that run again. If more fail, the cause is not chance.
const MOST: usize = 2;
/// How often such a test must pass in a row.
const TIMES: usize = 3;

/// The failed jobs whose tests run again.
#[derive(Debug)]
pub struct Again {
    left: usize,
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    first: Done,
    tests: Vec<String>,
    passed: usize,
}

/// What follows the end of a job.
pub enum Next {
    /// The result is final.
    Over(Done),
    /// This job runs before the result is final.
    Repeat(Job),
}

impl Default for Again {
    fn default() -> Self {
        Self { left: MOST, open: Vec::new() }
    }
}

impl Again {
    /// As the caller of the command has chosen it.
    pub fn of_environment() -> Self {
        let is_strict = std::env::var_os("STERNA_STRICT").is_some_and(|value| value != "0");
        Self { left: if is_strict { 0 } else { MOST }, open: Vec::new() }
    }

    /// Takes the result of a job, whose output was `text`.
    pub fn next(&mut self, job: &Job, text: &str, done: Done) -> Next {
        if let Some(name) = &job.again_for {
            return self.repeated(name, job, done);
        }
        let tests = log::failed(text, &job.tests);
        if done.result.is_ok() || tests.is_empty() || tests.len() > self.left {
            return Next::Over(done);
        }
        self.left -= tests.len();
        let repeat = alone(job, &tests);
        self.open.push(Open { first: done, tests, passed: 0 });
        Next::Repeat(repeat)
    }

    fn repeated(&mut self, name: &str, job: &Job, done: Done) -> Next {
        let Some(at) = self.open.iter().position(|open| open.first.name == name) else {
            return Next::Over(done);
        };
        let open = &mut self.open[at];
        open.first.cpu += done.cpu;
        open.first.ended = done.ended;
        if done.result.is_ok() {
            open.passed += 1;
            if open.passed < TIMES {
                return Next::Repeat(alone(job, &open.tests));
            }
        }
        let Open { mut first, tests, passed } = self.open.remove(at);
        if passed == TIMES {
            first.result = Ok(());
            first.counts.passed += first.counts.failed;
            first.counts.failed = 0;
            first.notes.extend(tests.iter().map(|test| {
                format!("UNSTABLE {test}: failed beside other tests, passed {TIMES} times alone")
            }));
        }
        Next::Over(first)
    }
}

/// A job that runs these tests of the job without any other job.
fn alone(job: &Job, tests: &[String]) -> Job {
    let mut command = Command::new(job.command.get_program());
    command.args(["--test-threads=1", "--exact"]).args(tests);
    for (key, value) in job.command.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    if let Some(directory) = job.command.get_current_dir() {
        command.current_dir(directory);
    }
    let name = job.again_for.as_ref().unwrap_or(&job.name);
    Job {
        tests: tests.to_vec(),
        beside: Beside::Nothing,
        limit: job.limit,
        again_for: Some(name.clone()),
        ..Job::new(job.part, format!("{name}, alone"), command)
    }
}
