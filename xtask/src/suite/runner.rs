//! Runs jobs in parallel.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_testing::CoreTime;

use super::again::{Again, Next};
use super::history::History;
use super::load::{self, Load};
use super::{Beside, Binary, Build, Done, Job, Report, directory, log, rules};
use crate::process::Result;

/// Interval at which the scheduler checks its jobs.
const TICK: Duration = Duration::from_millis(50);
/// Another program starts only if this share of the cores' time is idle…
const IDLE: f64 = 0.15;
/// …and this much memory in KiB is free. `MOST_FOR_EACH_CORE` limits the number of programs per
/// core.
const FREE_KIB: u64 = 2 << 20;
const MOST_FOR_EACH_CORE: usize = 4;

/// The state of the scheduler.
#[derive(Debug)]
pub struct Runner {
    began: Instant,
    cores: usize,
    load: Load,
    history: History,
    waiting: Vec<Job>,
    running: Vec<Running>,
    again: Again,
    report: Report,
    logs: PathBuf,
}

#[derive(Debug)]
struct Running {
    job: Job,
    child: Child,
    log: PathBuf,
    began: Instant,
    /// The time that is compared with the job's limit.
    time: CoreTime,
    cpu: Duration,
}

impl Runner {
    pub fn new() -> Result<Self> {
        let mut runner = Self::in_directory(&directory())?;
        runner.again = Again::of_environment();
        Ok(runner)
    }

    fn in_directory(directory: &Path) -> Result<Self> {
        let logs = directory.join("logs");
        std::fs::create_dir_all(&logs).map_err(|error| format!("{}: {error}", logs.display()))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (waiting, running, report) = (Vec::new(), Vec::new(), Report::default());
        let (began, load, history) = (Instant::now(), Load::new(), History::read(directory));
        let again = Again::default();
        Ok(Self { began, cores, load, history, waiting, running, again, report, logs })
    }

    pub fn add(&mut self, job: Job) {
        self.waiting.push(job);
    }

    /// Runs every added job, and the jobs that `wanted` derives from the tests of `build`.
    pub fn run(
        mut self,
        mut build: Option<Build>,
        wanted: impl Fn(&Binary) -> Result<Vec<Job>>,
    ) -> Result<Report> {
        if let Some(build) = &mut build {
            self.waiting.insert(0, build.take_job());
        }
        loop {
            // This must be asked before the messages are read, so that the last messages of an
            // ended build are read too.
            let builds = self.holds("build");
            if let Some(coming) = &mut build {
                self.take_in(coming, &wanted);
            }
            if !builds && let Some(build) = build.take() {
                for binary in build.never_ready() {
                    self.cannot_run(&binary, "a program of its package did not come out of the build".into());
                }
            }
            self.reap();
            while let Some(next) = self.next() {
                let job = self.waiting.remove(next);
                self.start(job);
            }
            if self.running.is_empty() && self.waiting.is_empty() && build.is_none() {
                self.history.write();
                return Ok(std::mem::take(&mut self.report));
            }
            std::thread::sleep(TICK);
        }
    }

    /// Adds jobs for the tests that the build has linked since the last call.
    fn take_in(&mut self, build: &mut Build, wanted: &impl Fn(&Binary) -> Result<Vec<Job>>) {
        let ready = build.come().unwrap_or_else(|why| {
            self.failed("build", "messages of the build".into(), why);
            Vec::new()
        });
        for binary in ready {
            match wanted(&binary) {
                Ok(jobs) => self.waiting.extend(jobs),
                Err(why) => self.cannot_run(&binary, why),
            }
        }
    }

    fn cannot_run(&mut self, binary: &Binary, why: String) {
        self.failed("tests", format!("{} {}", binary.package, binary.target), why);
    }

    /// Records the failure of a step that never became a job.
    fn failed(&mut self, part: &'static str, name: String, why: String) {
        let job = Job::new(part, name, Command::new("true"));
        self.ended(&job, Instant::now(), Duration::ZERO, "", Err(why));
    }

    /// Whether a job of that part has not ended yet.
    fn holds(&self, part: &str) -> bool {
        let running = self.running.iter().map(|running| &running.job);
        running.chain(&self.waiting).any(|job| job.part == part)
    }

    /// The longest waiting job that may start now.
    fn next(&mut self) -> Option<usize> {
        let beside = |job: &Job, beside: Beside| job.beside == beside;
        if self.running.iter().any(|running| beside(&running.job, Beside::Nothing)) {
            return None;
        }
        let builds = self.running.iter().any(|running| beside(&running.job, Beside::NoCargo));
        let others = self.running.iter().filter(|running| beside(&running.job, Beside::Others)).count();
        let more = others < self.cores * MOST_FOR_EACH_CORE;
        let room = others < self.cores || more && self.load.idle() > IDLE && load::free_kib() > FREE_KIB;
        let may = |job: &Job| {
            !job.after.iter().any(|part| self.holds(part))
                && match job.beside {
                    Beside::Others => room,
                    Beside::NoCargo => !builds,
                    Beside::Nothing => self.running.is_empty() && self.only_alone_are_left(),
                }
        };
        let ready = self.waiting.iter().enumerate().filter(|(_, job)| may(job));
        // Jobs that call cargo keep the order in which they were added, because each uses the
        // output of the previous one.
        let rank = |job: &Job| match job.beside {
            Beside::NoCargo => f64::INFINITY,
            _ => self.history.expected(&job.name),
        };
        ready
            .map(|(at, job)| (at, rank(job)))
            .fold(None, |best: Option<(usize, f64)>, (at, rank)| match best {
                Some((_, highest)) if highest >= rank => best,
                _ => Some((at, rank)),
            })
            .map(|(at, _)| at)
    }

    fn only_alone_are_left(&self) -> bool {
        self.waiting.iter().all(|job| job.beside == Beside::Nothing)
    }

    fn start(&mut self, mut job: Job) {
        let log = self.logs.join(format!("{}.log", job.name.replace([' ', '/'], "-")));
        match spawn(&mut job, &log) {
            Ok(child) => {
                let (began, time, cpu) = (Instant::now(), CoreTime::default(), Duration::ZERO);
                self.running.push(Running { job, child, log, began, time, cpu });
                self.load.forget();
            }
            Err(why) => self.ended(&job, Instant::now(), Duration::ZERO, "", Err(why)),
        }
    }

    fn reap(&mut self) {
        for at in (0..self.running.len()).rev() {
            let running = &mut self.running[at];
            if let Some(cpu) = load::cpu_of(running.child.id()) {
                running.cpu = cpu;
            }
            let result = match running.child.try_wait() {
                Ok(None) if !is_over(&mut running.time, running.job.limit) => continue,
                Ok(None) => {
                    load::kill_tree(running.child.id());
                    let _ = running.child.wait();
                    None
                }
                Ok(Some(status)) if status.success() => Some(Ok(())),
                Ok(Some(status)) => Some(Err(format!("ended with {status}"))),
                Err(error) => Some(Err(format!("cannot be waited for: {error}"))),
            };
            let running = self.running.remove(at);
            let text = std::fs::read(&running.log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let result = result.unwrap_or_else(|| Err(hung(&running.job, &running.time, running.cpu, &text)));
            if result.is_ok() {
                self.history.note(&running.job.name, running.began.elapsed());
            }
            self.ended(&running.job, running.began, running.cpu, &text, result);
        }
    }

    fn ended(&mut self, job: &Job, began: Instant, cpu: Duration, text: &str, result: Result<()>) {
        if result.is_err() {
            println!("\n==> {}\n{}\n", job.name, text.trim_end());
        }
        let mut notes = log::skips(text);
        let counts = log::counts(text, notes.len() as u64);
        if job.notes {
            notes.extend(text.lines().filter_map(|line| line.strip_prefix("    ")).map(str::to_owned));
        }
        notes.sort();
        notes.dedup();
        let at = |instant: Instant| instant.saturating_duration_since(self.began);
        let (name, part) = (job.name.clone(), job.part);
        let done =
            Done { part, name, began: at(began), ended: at(Instant::now()), cpu, counts, notes, result };
        println!("{}", done.line());
        log::closings(text).for_each(|line| println!("          {}", line.trim()));
        match self.again.next(job, text, done) {
            Next::Repeat(job) => self.waiting.push(job),
            Next::Over(done) => {
                let failed = done.result.is_err();
                self.report.add(done);
                if failed {
                    self.give_up_what_needs(part);
                }
            }
        }
    }

    /// Drops the jobs that need a failed build. They would otherwise test an older program that
    /// still exists.
    fn give_up_what_needs(&mut self, part: &'static str) {
        if part != "build" {
            return;
        }
        let (lost, waiting) = self.waiting.drain(..).partition(|job: &Job| job.after.contains(&part));
        self.waiting = waiting;
        for job in lost {
            self.ended(&job, Instant::now(), Duration::ZERO, "", Err(format!("not run: {part} failed")));
        }
    }
}

/// Kills the running jobs when the scheduler itself stops.
impl Drop for Runner {
    fn drop(&mut self) {
        self.running.iter().for_each(|running| load::kill_tree(running.child.id()));
    }
}

/// Whether a job has used up its limit.
///
/// The limit counts as on a quiet machine; a multiple of it counts on the clock.
fn is_over(time: &mut CoreTime, limit: Duration) -> bool {
    time.look() >= limit || time.by_the_clock() >= limit * rules::MOST_TIMES
}

fn hung(job: &Job, time: &CoreTime, cpu: Duration, text: &str) -> String {
    let running = log::running(text, &job.tests, rules::THREADS);
    let at = if running.is_empty() { String::new() } else { format!(" in {}", running.join(", ")) };
    let seconds = |time: Duration| time.as_secs();
    format!(
        "did not end within {} s{at} ({} s by the clock, {} s of CPU time)",
        seconds(job.limit),
        seconds(time.by_the_clock()),
        seconds(cpu)
    )
}

fn spawn(job: &mut Job, log: &PathBuf) -> Result<Child> {
    let create = |path: &PathBuf| File::create(path).map_err(|error| format!("{}: {error}", path.display()));
    let file = create(log)?;
    let again = file.try_clone().map_err(|error| format!("{}: {error}", log.display()))?;
    let stdout = match &job.messages {
        Some(path) => create(path)?,
        None => again,
    };
    let chosen = |name: &str| std::env::var_os(name).is_some();
    job.command.envs(rules::SEEDS.into_iter().filter(|(name, _)| !chosen(name)));
    job.command.stdin(Stdio::null()).stdout(stdout).stderr(file);
    job.command
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", job.command.get_program().to_string_lossy()))
}

#[cfg(test)]
mod tests;
