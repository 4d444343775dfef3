//! Informs the standby that QEMU has ended.
//!
//! An operator's `quit` and a guest that powers itself off are intended ends: the protection ends, and the standby
//! discards the guest. Any other end is a failure. The standby is informed of it, so that it takes over without
//! waiting for the end of the lease. Both messages are only sent if the process is known to have ended: a closed
//! monitor alone does not prove that the guest has stopped.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Guard;

/// How long the monitor may stay open after the stream. If QEMU has only left COLO, the failure is delayed by this
/// time.
const MONITOR_LIMIT: Duration = Duration::from_millis(500);
/// How long the process may run after its monitor was closed.
const END_LIMIT: Duration = Duration::from_secs(1);

/// A pidfd, which is readable when the process has ended. None if the kernel refuses it.
pub(super) fn watched(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Guard {
    /// Called when QEMU has closed its side of the stream.
    pub(super) fn tell_of_end(&self) {
        let Some(contact) = self.contact.get() else { return };
        let has_ended = self.monitor.wait(MONITOR_LIMIT, |seen| seen.gone.is_some())
            && self.is_qemu_gone()
            && self.process.as_ref().is_some_and(has_ended);
        if !has_ended {
            return;
        }
        match self.monitor.seen().wanted_end {
            Some(why) => {
                self.end_because(why);
                // The standby closes the stream when it sends its last message.
                contact.is_over_after_last_word();
            }
            None => contact.guest_gone("QEMU's process has ended"),
        }
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut ready = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
    let limit = Timespec { tv_sec: END_LIMIT.as_secs() as i64, tv_nsec: 0 };
    poll(&mut ready, Some(&limit)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_counts_as_ended_only_when_it_has() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = watched(child.id()).expect("the kernel has such descriptors");
        assert!(!has_ended(&process));

        child.kill().unwrap();

        assert!(has_ended(&process), "also before its parent has asked");
        child.wait().unwrap();
        assert!(has_ended(&process));
    }
}
