//! Takes a QEMU out of COLO, with its guest running. Used after the end of a protection, and after `sterna protect`
//! was killed.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ask::Ask;
use super::debugger;
use crate::error::DriveError;

/// How long QEMU may take to leave COLO, and again to run its guest.
pub(super) const LEAVE_LIMIT: Duration = Duration::from_secs(10);
/// How long a cancelled migration may take to end. One that was cancelled in COLO never does (specs/colo.md §8).
const CANCEL_LIMIT: Duration = Duration::from_secs(2);
/// Interval between two queries.
const LOOK: Duration = Duration::from_millis(20);

/// Takes QEMU out of COLO, and makes its guest run. Also ends a migration that failed or was cancelled. Returns the
/// migration's state: `cancelling` for one that was cancelled in COLO, which QEMU never ends.
///
/// `sockets`: a directory in which QEMU can create a socket. None: the directory of temporary files.
///
/// # Errors
/// The guest does not run, or QEMU does not answer.
pub(super) fn leave(ask: &mut Ask<'_>, sockets: Option<&Path>) -> Result<String, DriveError> {
    let migration = end_migration(ask)?;
    run(ask, &migration, sockets)?;
    Ok(migration)
}

fn end_migration(ask: &mut Ask<'_>) -> Result<String, DriveError> {
    let until = Instant::now() + LEAVE_LIMIT;
    let mut cancelled_since = None;
    loop {
        let state = word(&ask("query-migrate", Value::Null)?);
        match state.as_str() {
            // QEMU refuses this just before COLO begins. The next iteration repeats it.
            "colo" => drop(ask("x-colo-lost-heartbeat", Value::Null)),
            "" | "none" | "completed" | "failed" | "cancelled" => return Ok(state),
            "cancelling" if cancelled_since.get_or_insert_with(Instant::now).elapsed() >= CANCEL_LIMIT => {
                return Ok(state);
            }
            _ => {}
        }
        if Instant::now() >= until {
            return Ok(state);
        }
        std::thread::sleep(LOOK);
    }
}

fn run(ask: &mut Ask<'_>, migration: &str, sockets: Option<&Path>) -> Result<(), DriveError> {
    let until = Instant::now() + LEAVE_LIMIT;
    loop {
        let state = word(&ask("query-status", Value::Null)?);
        match state.as_str() {
            "running" => return Ok(()),
            // This side stopped the guest. After a failed migration QEMU may also resume it by itself, a moment later.
            "paused" | "postmigrate" | "finish-migrate" => drop(ask("cont", Value::Null)),
            // Stopped for a checkpoint that was cancelled: until its process ends, QEMU refuses `cont`, and `stop`
            // has no effect.
            "colo" if migration == "cancelling" => debugger::start_guest(ask, sockets)?,
            _ => {}
        }
        if Instant::now() >= until {
            return Err(DriveError::Failed(format!(
                "QEMU's guest does not run: its state is `{state}`, its migration's `{migration}`"
            )));
        }
        std::thread::sleep(LOOK);
    }
}

/// The operator's information about a QEMU whose migration does not end. None for other states.
pub(super) fn of_migration(state: &str) -> Option<String> {
    (state == "cancelling").then(|| {
        "QEMU's migration was cancelled while the guest was protected, and stays `cancelling`: the guest continues to \
         run, but this QEMU accepts no capability, migration or protection until its process ends"
            .to_owned()
    })
}

fn word(answer: &Value) -> String {
    answer["status"].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use serde_json::json;

    use super::*;

    /// A QEMU with the answers that were observed at version 11.1.
    struct Qemu {
        migration: &'static str,
        guest: &'static str,
        asked: Vec<String>,
        /// The thread that plays QEMU's debugger port.
        port: Option<std::thread::JoinHandle<bool>>,
    }

    impl Qemu {
        fn answer(&mut self, command: &str, arguments: &Value) -> Result<Value, DriveError> {
            self.asked.push(command.to_owned());
            match (command, self.migration, self.guest) {
                ("query-migrate", ..) => return Ok(json!({ "status": self.migration })),
                ("query-status", ..) => return Ok(json!({ "status": self.guest })),
                ("x-colo-lost-heartbeat", "colo", _) => {
                    (self.migration, self.guest) = ("completed", "running")
                }
                ("human-monitor-command", ..) => self.debugger(arguments["command-line"].as_str().unwrap()),
                ("cont", _, "paused") => self.guest = "running",
                _ => return Err(DriveError::Failed(format!("{command} is refused"))),
            }
            Ok(json!({}))
        }

        /// Opens or closes the debugger port. A debugger that detaches starts the guest, in whatever state it is.
        fn debugger(&mut self, line: &str) {
            if line == "gdbserver none" {
                let has_detached = self.port.take().is_some_and(|port| port.join().unwrap());
                self.guest = if has_detached { "running" } else { self.guest };
                return;
            }
            let path = line.strip_prefix("gdbserver unix:").and_then(|rest| rest.split(',').next()).unwrap();
            let listener = UnixListener::bind(path).unwrap();
            self.port = Some(std::thread::spawn(move || {
                let mut asked = [0; 6];
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut asked).unwrap();
                stream.write_all(b"+$T05core:01;#38$OK#9a").unwrap();
                asked == *b"+$D#44"
            }));
        }
    }

    #[test]
    fn guest_runs_after_colo_and_after_a_cancel_in_and_between_checkpoints() {
        for (migration, guest, ends) in [
            ("colo", "colo", "completed"),
            ("cancelling", "colo", "cancelling"),
            ("cancelling", "running", "cancelling"),
            ("failed", "paused", "failed"),
            ("none", "running", "none"),
        ] {
            let mut qemu = Qemu { migration, guest, asked: Vec::new(), port: None };

            let left = leave(&mut |command, arguments| qemu.answer(command, &arguments), None);

            assert_eq!((left.unwrap().as_str(), qemu.guest), (ends, "running"), "{migration}, {guest}");
        }
    }

    #[test]
    fn guest_that_cannot_run_is_named_with_both_states() {
        let mut qemu = Qemu { migration: "failed", guest: "internal-error", asked: Vec::new(), port: None };

        let error =
            leave(&mut |command, arguments| qemu.answer(command, &arguments), None).unwrap_err().to_string();

        assert!(error.contains("internal-error") && error.contains("failed"), "{error}");
    }
}
