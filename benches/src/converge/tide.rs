//! Sterna's VM with the tide guest. The guest writes its memory by rules and reports its longest pause.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::Lab;
use sterna_benches::peer::Peer;

/// Time limit for undoing a cancelled migration.
const CANCELLED: Duration = Duration::from_secs(10);

const PAGE_BYTES: f64 = 4096.0;

/// The write load of the guest.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// The guest is threads of a process and not KVM. Some machines emulate each guest instruction under KVM.
    pub process: bool,
    pub pattern: &'static str,
    /// Pages per second; 0: as many as the guest can.
    pub rate: u64,
    pub ram_mib: u64,
    pub working_set_mib: u64,
}

impl Load {
    fn arguments(self) -> Vec<String> {
        vec![
            format!("--machine={}", if self.process { "process" } else { "kvm" }),
            format!("--ram={}M", self.ram_mib),
            format!("--pattern={}", self.pattern),
            format!("--rate={}", self.rate),
            format!("--working-set={}M", self.working_set_mib),
            "--fill=random".into(),
            "--prealloc".into(),
        ]
    }
}

/// Readings of a migration that kept running.
pub struct Readings {
    /// Values of `mbps`, ten per second.
    pub megabits: Vec<f64>,
    /// Bytes per second that the guest wrote meanwhile. A page counts each time it is written.
    pub written_bytes: f64,
    /// The engine's own statistics at the end.
    pub statistics: Value,
}

/// A machine with a running guest, and a machine that waits for it.
pub struct Pair {
    pub source: Peer,
    pub destination: Peer,
}

impl Pair {
    pub fn new(lab: &Lab, load: Load) -> Result<Self, Failure> {
        let source = lab.start_tide(load.arguments())?;
        Ok(Self { source, destination: waiting(lab, load)? })
    }

    /// Prepares the next migration, from the machine to which the guest has moved.
    pub fn again(self, lab: &Lab, load: Load) -> Result<Self, Failure> {
        let Self { source, destination } = self;
        drop(source);
        Ok(Self { source: destination, destination: waiting(lab, load)? })
    }

    /// Sets the same parameters and capabilities on both sides.
    pub fn set(&mut self, parameters: &Value, capabilities: &[&str]) -> Result<(), Failure> {
        for peer in [&mut self.source, &mut self.destination] {
            let on = ["events"].iter().chain(capabilities);
            let on: Vec<Value> = on.map(|name| json!({"capability": name, "state": true})).collect();
            peer.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
            peer.execute("migrate-set-parameters", parameters.clone())?;
            peer.forget_events()?;
        }
        Ok(())
    }

    /// Migrates. Returns the source's `query-migrate` and the duration in seconds. It is an error if the
    /// migration failed, or exceeded `limit` and was cancelled.
    pub fn migrate(&mut self, limit: Duration) -> Result<(Value, f64), Failure> {
        let address = self.destination.listen()?;
        self.source.execute("x-sterna-set-guest", json!({ "reset-gap": true }))?;
        let began = Instant::now();
        self.source.execute("migrate", json!({ "uri": address }))?;
        let ended = self.source.wait_until_over(limit);
        let took = began.elapsed().as_secs_f64();
        if let Err(why) = ended {
            // Cancel is refused if the migration has already ended, which is no problem.
            let _ = self.source.execute("migrate_cancel", Value::Null);
            return Err(why);
        }
        self.destination.wait_until_completed()?;
        Ok((self.source.execute("query-migrate", Value::Null)?, took))
    }

    /// Like [`Self::migrate`], but `None` if the migration does not converge. The engine decides that, or
    /// `limit` has passed. Any other failure shows nothing about convergence and is an error.
    pub fn migrate_if_it_converges(&mut self, limit: Duration) -> Result<Option<(Value, f64)>, Failure> {
        let why = match self.migrate(limit) {
            Ok(came) => return Ok(Some(came)),
            Err(why) => why,
        };
        let gave_up = Instant::now() + CANCELLED;
        loop {
            let query = self.source.execute("query-migrate", Value::Null)?;
            let reason = query["error-desc"].as_str().unwrap_or_default();
            match query["status"].as_str() {
                Some("cancelled") => return Ok(None),
                Some("failed") if reason.starts_with("the migration does not converge") => return Ok(None),
                Some("cancelling" | "failing" | "active") if Instant::now() < gave_up => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                _ => return Err(why),
            }
        }
    }

    /// Runs a migration for `rounds`, and then lets it end. Reads the bandwidth ten times per second.
    pub fn migrate_without_end(&mut self, rounds: Duration, limit: Duration) -> Result<Readings, Failure> {
        let address = self.destination.listen()?;
        self.source.execute("migrate", json!({ "uri": address }))?;
        // The first quarter is skipped, because its readings are from the first round.
        std::thread::sleep(rounds / 4);
        let before = self.steps()?;
        let (began, mut megabits) = (Instant::now(), Vec::new());
        while began.elapsed() < rounds {
            std::thread::sleep(Duration::from_millis(100));
            let query = self.source.execute("query-migrate", Value::Null)?;
            megabits.extend(query["ram"]["mbps"].as_f64());
        }
        let written_bytes = (self.steps()? - before) * PAGE_BYTES / began.elapsed().as_secs_f64();
        self.source.execute("migrate-set-parameters", json!({"downtime-limit": 5000}))?;
        self.source.wait_until_over(limit)?;
        self.destination.wait_until_completed()?;
        Ok(Readings { megabits, written_bytes, statistics: self.statistics()? })
    }

    /// Bytes per second that the guest at the source writes, measured for `time`. A page counts each time it
    /// is written.
    pub fn written_bytes_per_second(&mut self, time: Duration) -> Result<f64, Failure> {
        let before = self.steps()?;
        let began = Instant::now();
        std::thread::sleep(time);
        Ok((self.steps()? - before) * PAGE_BYTES / began.elapsed().as_secs_f64())
    }

    /// Pages that the guest at the source has written so far.
    fn steps(&mut self) -> Result<f64, Failure> {
        let progress = self.source.execute("x-sterna-query-guest", Value::Null)?;
        let steps = progress["steps"].as_array().ok_or_else(|| format!("no steps: {progress}"))?;
        Ok(steps.iter().filter_map(Value::as_f64).sum())
    }

    /// The engine's own statistics of the migration at the source.
    pub fn statistics(&mut self) -> Result<Value, Failure> {
        let mut said = self.source.execute("x-sterna-migration-statistics", Value::Null)?;
        Ok(said["outgoing"].take())
    }

    /// The guest's longest pause since the migration started, in seconds.
    pub fn pause_of_the_guest(&mut self) -> Result<f64, Failure> {
        let progress = self.destination.execute("x-sterna-query-guest", Value::Null)?;
        progress["longest_gap_seconds"]
            .as_f64()
            .ok_or_else(|| format!("the guest does not say how long it stood still: {progress}"))
    }
}

fn waiting(lab: &Lab, load: Load) -> Result<Peer, Failure> {
    let mut arguments = load.arguments();
    arguments.push("--incoming=defer".into());
    lab.start_tide(arguments)
}
