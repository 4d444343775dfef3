//! Delivers the last packets of a guest in a planned takeover.
//!
//! QEMU delivers no packets of a network card while its guest is paused, and after the last checkpoint the guest would
//! stay paused. So the guest runs for another moment, until the packets of that checkpoint have left. Only then the
//! standby is informed that it may start the guest. No effect of this moment is visible outside: its output waits at
//! the gates and is dropped, and its disks at the standby are disconnected. A disk that both hosts share would be
//! written after the checkpoint. In this case the guest does not run, and the packets are lost, as a network may lose
//! them.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::gates::Gates;
use super::{Guard, LAST_LIMIT, LOOK, Last, STOP_LIMIT};
use crate::error::DriveError;

/// How long packets may take to leave. Also limited to `lease / OF_LEASE`, because no heartbeat is sent meanwhile.
const DELIVER_LIMIT: Duration = Duration::from_millis(500);
const OF_LEASE: u32 = 4;
/// Number of rounds of QEMU's main loop in which it should forward the packets that it has read.
const ROUNDS: u32 = 20;
/// Interval between two checks whether the guest runs or is paused.
const SOON: Duration = Duration::from_millis(1);

impl Guard {
    /// Delivers the output up to a gate's `epoch`, whose checkpoint is held and is the last one.
    /// When this returns, the guest is paused permanently.
    pub(super) fn deliver_last(&self, epoch: u64) {
        if !self.waits_for_end_of_last() {
            return;
        }
        if self.insist_on_stop(|| self.stop_for_good()) {
            return;
        }
        let _hand = self.hand.lock();
        let Some(cards) = self.with_gates(Gates::len).filter(|cards| *cards > 0) else { return };
        let lost = |why: String| {
            let text = format!(
                "packets that {cards} network cards sent before the last checkpoint may be undelivered: {why}"
            );
            self.left_unsaid.get_or_init(|| text);
        };
        if let Some(disk) = self.shared_disk.get() {
            return lost(format!(
                "to deliver them, the guest would have to run for a moment, and would write to the disk {disk}, which \
                 is shared"
            ));
        }
        if let Err(error) = self.run_until_delivered(epoch) {
            lost(error.to_string());
        }
        // The standby starts the guest after this.
        self.insist_on_stop(|| {
            self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
            match self.monitor.run_state(STOP_LIMIT)?.as_str() {
                "running" => Err(DriveError::Failed("the guest runs".to_owned())),
                _ => Ok(()),
            }
        });
    }

    /// Waits for RECEIVED of the last checkpoint, which may be read after the contact's answer. False if none arrives.
    fn waits_for_end_of_last(&self) -> bool {
        let until = Instant::now() + LAST_LIMIT;
        let mut last = self.last.lock();
        loop {
            match *last {
                Last::Stands => return true,
                Last::Granted(_) if Instant::now() < until && !self.is_over() => {
                    self.changed.wait_for(&mut last, LOOK);
                }
                _ => return false,
            }
        }
    }

    /// Repeats `stop` until it succeeds, because the standby relies on it. True if QEMU has ended.
    fn insist_on_stop(&self, stop: impl Fn() -> Result<(), DriveError>) -> bool {
        while let Err(error) = stop() {
            if error.is_disconnect() || self.monitor.seen().gone.is_some() {
                return true;
            }
            std::thread::sleep(LOOK);
        }
        false
    }

    fn run_until_delivered(&self, epoch: u64) -> Result<(), DriveError> {
        let until = Instant::now() + DELIVER_LIMIT.min(self.lease / OF_LEASE);
        // After the end of the lease the standby may run the guest.
        let has_lease = || self.contact.get().is_some_and(|contact| contact.may_say(epoch.saturating_sub(1)));
        let is_late = || Instant::now() >= until || !has_lease();
        if is_late() {
            return Err(DriveError::Failed("the lease has ended".to_owned()));
        }
        // When QEMU has left COLO, it resumes the guest.
        self.monitor.execute("x-colo-lost-heartbeat", Value::Null, STOP_LIMIT)?;
        while self.monitor.run_state(STOP_LIMIT)? != "running" {
            if is_late() {
                return Err(DriveError::Failed("QEMU does not leave COLO".to_owned()));
            }
            std::thread::sleep(SOON);
        }
        while !self.with_gates(|gates| Gates::has_delivered(gates, epoch)).unwrap_or(true) {
            if is_late() {
                return Err(DriveError::Failed("QEMU does not accept them".to_owned()));
            }
            std::thread::sleep(SOON);
        }
        // Packets that QEMU has read while its guest was paused wait in a queue, which the main loop empties when the
        // guest runs. QEMU does not report that the queue is empty, but each of these answers takes the loop round
        // once.
        for _ in 0..ROUNDS {
            self.monitor.run_state(STOP_LIMIT)?;
            std::thread::sleep(SOON);
        }
        Ok(())
    }
}
