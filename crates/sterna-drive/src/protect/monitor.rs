//! The primary's monitor, which several threads share, and the guest's state as its events report it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use sterna_qmp::{ClientError, QmpEvent};

use crate::error::DriveError;
use crate::vm::Vm;

/// Number of pauses that are kept for the percentiles.
const PAUSES: usize = 1000;
/// Interval of checks of `seen`: events may be read by another thread that waits for an answer.
const LOOK: Duration = Duration::from_millis(10);

/// The only connection to QEMU's monitor, because QEMU serves one client per socket.
pub(super) struct Monitor {
    vm: Mutex<Vm>,
    socket: OwnedFd,
    seen: Mutex<Seen>,
    changed: Condvar,
}

/// State that was learned from events.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// Time when the guest was paused. None while it runs.
    pub(super) stands_since: Option<Instant>,
    stopped_at: Option<Duration>,
    /// Number of events that report the end of COLO.
    pub(super) colo_exits: u64,
    /// A migration has failed: the seeding, or the stream of a protection that ended.
    pub(super) has_migration_failed: bool,
    /// QEMU's migration was cancelled by another client. A protection never cancels it.
    pub(super) was_cancelled: bool,
    /// The name of a device that was unplugged.
    pub(super) unplugged: Option<String>,
    /// Durations of the last pauses for checkpoints, from STOP to RESUME, by QEMU's timestamps.
    pub(super) pauses: VecDeque<Duration>,
    /// Total number of pauses for checkpoints.
    pub(super) pause_count: u64,
    /// A sentence about who ended QEMU on purpose, if QEMU has reported such an end.
    pub(super) wanted_end: Option<String>,
    /// The reason why the monitor is closed.
    pub(super) gone: Option<String>,
    counts_pauses: bool,
}

impl Monitor {
    pub(super) fn new(mut vm: Vm) -> Result<Self, DriveError> {
        let socket = vm.client().socket().try_clone_to_owned();
        let socket = socket.map_err(|error| DriveError::file("duplicate", "the monitor's socket", error))?;
        Ok(Self { vm: Mutex::new(vm), socket, seen: Mutex::default(), changed: Condvar::new() })
    }

    /// Calls `act` with exclusive use of the connection.
    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut Vm) -> Result<T, DriveError>,
    ) -> Result<T, DriveError> {
        let mut vm = self.vm.lock();
        let done = act(&mut vm);
        self.take_events(&mut vm);
        done
    }

    /// Executes a command. Its answer may take up to `limit`.
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

    /// The `status` of `query-status`.
    pub(super) fn run_state(&self, limit: Duration) -> Result<String, DriveError> {
        let answer = self.execute("query-status", Value::Null, limit)?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// QEMU's reason why the migration failed.
    pub(super) fn why_migration_failed(&self, limit: Duration) -> String {
        match self.execute("query-migrate", Value::Null, limit) {
            Ok(answer) => answer["error-desc"].as_str().unwrap_or("QEMU gives no reason").to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// Reads the events that have arrived, after waiting up to `LOOK` for one.
    pub(super) fn pump(&self) {
        if self.seen.lock().gone.is_some() {
            // A closed socket is always readable, so `poll` would not wait.
            return std::thread::sleep(LOOK);
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        let mut ready = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        // A failed poll is harmless: the error appears again when the socket is read.
        let _ = poll(&mut ready, Some(&timeout));
        match self.vm.try_lock() {
            Some(mut vm) => self.take_events(&mut vm),
            // The thread that has the lock also reads the events.
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }

    /// Waits at most `most` until `is` holds for the events seen. False after that time.
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

    /// A copy of the state that was learned from events.
    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// Discards the pauses so far, because they were not for checkpoints.
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
            "SHUTDOWN" => {
                let why = match event.data["reason"].as_str() {
                    Some("host-qmp-quit") => "an operator ended QEMU with `quit` at its monitor",
                    Some("guest-shutdown") => "the guest has powered itself off",
                    // A signal, an error or a panic: the standby must continue the guest.
                    _ => return,
                };
                self.wanted_end = Some(why.to_owned());
            }
            "COLO_EXIT" => self.colo_exits += 1,
            "MIGRATION" => {
                let status = event.data["status"].as_str().unwrap_or_default();
                self.has_migration_failed |= status == "failed";
                self.was_cancelled |= status == "cancelling" || status == "cancelled";
            }
            "DEVICE_DELETED" => {
                let device = event.data["device"].as_str().or(event.data["path"].as_str());
                self.unplugged.get_or_insert_with(|| device.unwrap_or_default().to_owned());
            }
            _ => {}
        }
    }

    /// The pause that `per_mille` of 1000 pauses do not exceed. None before the first pause.
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
    use sterna_qmp::Endpoint;

    use super::*;

    fn event(name: &str, micros: u64) -> QmpEvent {
        QmpEvent::new(name, Value::Null, Duration::from_micros(micros))
    }

    /// A monitor that sends its greeting and closes the connection.
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
    fn only_quit_and_a_guest_that_powers_off_are_wanted_ends() {
        for (reason, is_wanted) in [
            ("host-qmp-quit", true),
            ("guest-shutdown", true),
            ("host-signal", false),
            ("guest-panic", false),
            ("host-error", false),
            ("guest-reset", false),
        ] {
            let mut seen = Seen::default();
            let data = json!({"guest": reason.starts_with("guest"), "reason": reason});
            seen.take(&QmpEvent::new("SHUTDOWN", data, Duration::from_micros(1)));
            assert_eq!(seen.wanted_end.is_some(), is_wanted, "{reason}");
        }
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
