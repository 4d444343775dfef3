//! The process at the other end of a socket: the VMM.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;

/// The process that connected. Its pidfd is opened while the connection exists, so that it is never another process with the
/// same number.
pub(crate) struct Peer {
    pid: Option<Pid>,
    process: Result<OwnedFd, String>,
}

impl Peer {
    /// Finds the process that connected `socket`.
    pub(crate) fn of(socket: &OwnedFd) -> Self {
        let pid = match sockopt::socket_peercred(socket) {
            Ok(credentials) => Pid::from_raw(credentials.pid.as_raw_pid()),
            Err(error) => return Self { pid: None, process: Err(format!("SO_PEERCRED: {error}")) },
        };
        let Some(number) = pid else {
            let why = "it is in another pid namespace; run `sterna serve` where it can see the VMM's process";
            return Self { pid, process: Err(why.to_owned()) };
        };
        if number == getpid() {
            return Self { pid, process: Err("it is this process".to_owned()) };
        }
        let process = pidfd_open(number, PidfdFlags::empty()).map_err(|error| format!("pidfd_open: {error}"));
        if process.is_ok() && is_closed(socket) {
            // The process may have ended before its pidfd was opened.
            return Self { pid, process: Err("it has closed its connection".to_owned()) };
        }
        Self { pid, process }
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.pid.map(Pid::as_raw_pid)
    }

    /// Whether the process is known to have ended; waits for it, at most `limit`.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let Ok(process) = &self.process else { return false };
        let mut polled = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        let limit = Timespec::try_from(limit).ok();
        poll(&mut polled, limit.as_ref()).is_ok_and(|count| count > 0)
    }

    /// Kills the process. The error says why that is not possible.
    pub(crate) fn kill(&self) -> Result<(), String> {
        let process = self.process.as_ref().map_err(Clone::clone)?;
        match pidfd_send_signal(process, Signal::KILL) {
            // It has ended by itself.
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(format!("pidfd_send_signal: {error}")),
        }
    }
}

fn is_closed(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let closed = PollFlags::RDHUP | PollFlags::HUP;
    poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0) && polled[0].revents().intersects(closed)
}
