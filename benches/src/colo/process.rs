//! Processes of Sterna's programs, and waiting with a time limit.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_benches::clock::CpuClock;
use sterna_qmp::{Client, Endpoint};

use crate::Failure;

/// Time limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A process of a Sterna program, which is killed when dropped.
pub(crate) struct Program {
    process: Child,
    pub(crate) clock: CpuClock,
}

impl Program {
    pub(crate) fn start(command: &mut Command, log: &Path) -> Result<Self, Failure> {
        let log = std::fs::File::create(log).map_err(|error| format!("{}: {error}", log.display()))?;
        let out = log.try_clone().map_err(|error| error.to_string())?;
        let started = command.stdin(Stdio::null()).stdout(out).stderr(log).spawn();
        let mut process = started.map_err(|error| format!("cannot start sterna: {error}"))?;
        match CpuClock::of(process.id()) {
            Ok(clock) => Ok(Self { process, clock }),
            Err(why) => {
                // An error means that the process has ended by itself.
                let _ = process.kill();
                let _ = process.wait();
                Err(why)
            }
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn kill(&mut self) {
        // Errors mean that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls a function until it returns a value, or until the time limit.
pub(crate) fn wait<T>(
    what: &str,
    between: Duration,
    mut look: impl FnMut() -> Result<Option<T>, Failure>,
) -> Result<T, Failure> {
    let begin = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("{what} did not come"));
        }
        std::thread::sleep(between);
    }
}

/// Connects to the monitor at that socket when it exists.
pub(crate) fn monitor(socket: &Path) -> Result<Client, Failure> {
    wait("a monitor", Duration::from_millis(2), || {
        Ok(Client::connect(&Endpoint::Unix(socket.to_owned()), PATIENCE).ok())
    })
}

pub(crate) fn ask(monitor: &mut Client, command: &str) -> Result<Value, Failure> {
    monitor.execute(command, Value::Null).map_err(|error| error.to_string())
}

pub(crate) fn number(value: &Value, name: &str) -> Result<u64, Failure> {
    value[name].as_u64().ok_or_else(|| format!("{name} is missing: {value}"))
}

pub(crate) fn seconds(value: &Value, name: &str) -> Result<Duration, Failure> {
    let seconds = value[name].as_f64().ok_or_else(|| format!("{name} is missing: {value}"))?;
    Ok(Duration::from_secs_f64(seconds.max(0.0)))
}
