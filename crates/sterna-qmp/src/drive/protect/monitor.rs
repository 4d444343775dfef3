//! The primary's monitor, which several threads use, and what it has told of the guest.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use crate::client::{ClientError, QmpEvent};
use crate::drive::error::DriveError;
use crate::drive::vm::Vm;

/// Pauses that are remembered for the percentiles.
const PAUSES: usize = 1000;
/// Events may have been read by somebody who waited for an answer: looked at as often as this.
const LOOK: Duration = Duration::from_millis(10);

/// The one connection. QEMU serves one client on a socket.
pub(super) struct Monitor {
    vm: Mutex<Vm>,
    socket: OwnedFd,
    seen: Mutex<Seen>,
    changed: Condvar,
}

/// What events have told.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// When the guest was stopped, if it stands.
    pub(super) stands_since: Option<Instant>,
    stopped_at: Option<Duration>,
    /// How often COLO ended.
    pub(super) colo_exits: u64,
    /// A migration has failed: the seeding, or a protection's end.
    pub(super) has_migration_failed: bool,
    /// A device that was unplugged.
    pub(super) unplugged: Option<String>,
    /// From STOP to RESUME, in QEMU's own time, of the last checkpoints.
    pub(super) pauses: VecDeque<Duration>,
    /// All of them.
    pub(super) pause_count: u64,
    /// Why there is no monitor any more.
    pub(super) gone: Option<String>,
    counts_pauses: bool,
}

impl Monitor {
    pub(super) fn new(mut vm: Vm) -> Result<Self, DriveError> {
        let socket = vm.client().socket().try_clone_to_owned();
        let socket = socket.map_err(|error| DriveError::file("duplicate", "the monitor's socket", error))?;
        Ok(Self { vm: Mutex::new(vm), socket, seen: Mutex::default(), changed: Condvar::new() })
    }

    /// Uses the connection for something that takes it for itself.
    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut Vm) -> Result<T, DriveError>,
    ) -> Result<T, DriveError> {
        let mut vm = self.vm.lock();
        let done = act(&mut vm);
        self.take_events(&mut vm);
        done
    }

    /// Executes a command; its answer may take so long.
    pub(super) fn execute(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, DriveError> {
        self.with(|vm| {
            vm.client().set_limit(limit);
            vm.execute(command, arguments)
        })
    }

    /// `query-status`'s word.
    pub(super) fn run_state(&self, limit: Duration) -> Result<String, DriveError> {
        let answer = self.execute("query-status", Value::Null, limit)?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// `query-migrate`'s word; empty before any.
    pub(super) fn migration(&self, limit: Duration) -> Result<String, DriveError> {
        let answer = self.execute("query-migrate", Value::Null, limit)?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Why QEMU's migration failed, as it says.
    pub(super) fn why_migration_failed(&self, limit: Duration) -> String {
        match self.execute("query-migrate", Value::Null, limit) {
            Ok(answer) => answer["error-desc"].as_str().unwrap_or("QEMU says no reason").to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// Takes what has come, after waiting for it no longer than a moment.
    pub(super) fn pump(&self) {
        if self.seen.lock().gone.is_some() {
            // A socket that has ended is always ready.
            return std::thread::sleep(LOOK);
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        let mut ready = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        // An error shows when it is read.
        let _ = poll(&mut ready, Some(&timeout));
        match self.vm.try_lock() {
            Some(mut vm) => self.take_events(&mut vm),
            // Whoever has it takes what comes.
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }

    /// Waits until what was seen is so, no longer than `most`. True: it is.
    pub(super) fn wait(&self, most: Duration, is: impl Fn(&Seen) -> bool) -> bool {
        let until = Instant::now() + most;
        let mut seen = self.seen.lock();
        while !is(&seen) {
            if self.changed.wait_until(&mut seen, until).timed_out() {
                return is(&seen);
            }
        }
        true
    }

    /// What was seen.
    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// What was stopped so far was stopped for something else.
    pub(super) fn forget_pauses(&self) {
        let mut seen = self.seen.lock();
        (seen.pauses, seen.pause_count, seen.counts_pauses) = (VecDeque::new(), 0, false);
        seen.stopped_at = None;
    }

    fn take_events(&self, vm: &mut Vm) {
        loop {
            match vm.next_event(Duration::ZERO) {
                Ok(Some(event)) => self.seen.lock().take(&event),
                Ok(None) => break,
                Err(error) => {
                    let is_gone = error.is_disconnect()
                        || matches!(&error, DriveError::Monitor { error: ClientError::Protocol(_), .. });
                    if is_gone {
                        self.seen.lock().gone.get_or_insert_with(|| error.to_string());
                    }
                    break;
                }
            }
        }
        self.changed.notify_all();
    }
}

impl Seen {
    fn take(&mut self, event: &QmpEvent) {
        match event.name.as_str() {
            "STOP" => {
                self.stands_since = Some(Instant::now());
                self.stopped_at = Some(event.timestamp);
            }
            "RESUME" => {
                self.stands_since = None;
                if let Some(stopped) = self.stopped_at.take()
                    && std::mem::replace(&mut self.counts_pauses, true)
                {
                    if self.pauses.len() == PAUSES {
                        self.pauses.pop_front();
                    }
                    self.pauses.push_back(event.timestamp.saturating_sub(stopped));
                    self.pause_count += 1;
                }
            }
            "COLO_EXIT" => self.colo_exits += 1,
            "MIGRATION" => self.has_migration_failed |= event.data["status"] == "failed",
            "DEVICE_DELETED" => {
                let device = event.data["device"].as_str().or(event.data["path"].as_str());
                self.unplugged.get_or_insert_with(|| device.unwrap_or_default().to_owned());
            }
            _ => {}
        }
    }

    /// The pause that so many of a thousand do not exceed; none before the first.
    pub(super) fn pause(&self, per_mille: usize) -> Option<Duration> {
        let mut pauses: Vec<_> = self.pauses.iter().copied().collect();
        pauses.sort_unstable();
        let index = (pauses.len().checked_sub(1)? * per_mille).div_ceil(1000);
        pauses.get(index).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};

    use serde_json::json;

    use super::*;
    use crate::Endpoint;

    fn event(name: &str, micros: u64) -> QmpEvent {
        QmpEvent { name: name.to_owned(), data: Value::Null, timestamp: Duration::from_micros(micros) }
    }

    /// A monitor that says hello and ends.
    fn ended() -> Monitor {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let serves = std::thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let version = json!({"qemu": {"major": 11, "minor": 0, "micro": 0}, "package": ""});
            writeln!(&socket, "{}", json!({"QMP": {"version": version, "capabilities": []}})).unwrap();
            let mut line = String::new();
            BufReader::new(&socket).read_line(&mut line).unwrap();
            let asked: Value = serde_json::from_str(&line).unwrap();
            writeln!(&socket, "{}", json!({"return": {}, "id": asked["id"]})).unwrap();
        });
        let monitor = Monitor::new(Vm::connect(&Endpoint::Unix(path)).unwrap()).unwrap();
        serves.join().unwrap();
        monitor
    }

    #[test]
    fn monitor_that_has_ended_is_not_read_again_and_again() {
        let monitor = ended();
        while monitor.seen().gone.is_none() {
            monitor.pump();
        }
        let begin = Instant::now();
        (0..5).for_each(|_| monitor.pump());
        assert!(begin.elapsed() >= 5 * LOOK);
    }

    #[test]
    fn pauses_are_of_qemus_time_and_the_seedings_is_none() {
        let mut seen = Seen::default();
        for (at, took) in [(100, 900), (2_000, 5), (3_000, 7), (4_000, 6)] {
            seen.take(&event("STOP", at));
            assert!(seen.stands_since.is_some());
            seen.take(&event("RESUME", at + took));
        }
        let micros: Vec<_> = seen.pauses.iter().map(Duration::as_micros).collect();
        assert_eq!((micros, seen.pause_count), (vec![5, 7, 6], 3));
        assert_eq!(seen.pause(500), Some(Duration::from_micros(6)));
        assert_eq!(seen.pause(990), Some(Duration::from_micros(7)));
        assert_eq!(seen.stands_since, None);
        assert_eq!(Seen::default().pause(500), None);
    }
}
