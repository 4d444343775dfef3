//! The last words of a guest that is handed over as planned.
//!
//! QEMU delivers nothing of a network card while its guest stands, and behind the last checkpoint it stands for good. So the guest runs on for
//! a moment, until the packets of that checkpoint have left, before the standby is told that it may start it. Nobody notices: what it says in
//! this moment waits at the gates and is dropped with it, and its disks at the standby are cut off. A disk that both hosts share would be
//! written behind the checkpoint: then the guest does not run, and the packets are lost as in a network.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::gates::Gates;
use super::{Guard, LAST_LIMIT, LOOK, Last, STOP_LIMIT};
use crate::drive::error::DriveError;

/// How long packets may take to leave; and no longer than this part of the lease, in which no heartbeat is sent.
const DELIVER_LIMIT: Duration = Duration::from_millis(500);
const OF_LEASE: u32 = 4;
/// Rounds of QEMU's main loop in which it should hand on what it has read.
const ROUNDS: u32 = 20;
/// Between two looks at a guest that is to run or to stand.
const SOON: Duration = Duration::from_millis(1);

impl Guard {
    /// The checkpoint that ends a gate's `epoch` is held and is the last of all: what was said before it leaves. When this returns, the guest
    /// stands for good.
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
                "packets that {cards} network cards said before the last checkpoint may not have been delivered: {why}"
            );
            self.left_unsaid.get_or_init(|| text);
        };
        if let Some(disk) = self.shared_disk.get() {
            return lost(format!(
                "for that the guest has to run on for a moment, and it would write the disk {disk}, which is shared"
            ));
        }
        if let Err(error) = self.run_until_delivered(epoch) {
            lost(error.to_string());
        }
        // The standby starts the guest behind this.
        self.insist_on_stop(|| {
            self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
            match self.monitor.run_state(STOP_LIMIT)?.as_str() {
                "running" => Err(DriveError::Failed("the guest runs".to_owned())),
                _ => Ok(()),
            }
        });
    }

    /// RECEIVED of the last checkpoint may be read later than the contact's answer. False: there is none.
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

    /// Until it is done: nobody may believe that a guest stands which runs. True: QEMU has ended.
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
        let is_late = || Instant::now() >= until;
        // It lets the guest run when QEMU has left COLO.
        self.monitor.execute("x-colo-lost-heartbeat", Value::Null, STOP_LIMIT)?;
        while self.monitor.run_state(STOP_LIMIT)? != "running" {
            if is_late() {
                return Err(DriveError::Failed("QEMU does not leave COLO".to_owned()));
            }
            std::thread::sleep(SOON);
        }
        while !self.with_gates(|gates| Gates::has_delivered(gates, epoch)).unwrap_or(true) {
            if is_late() {
                return Err(DriveError::Failed("QEMU does not take them".to_owned()));
            }
            std::thread::sleep(SOON);
        }
        // What QEMU has read while its guest stood waits in a queue, which its main loop empties when the guest runs. Nothing tells
        // that it has, but each of these answers takes the loop round once.
        for _ in 0..ROUNDS {
            self.monitor.run_state(STOP_LIMIT)?;
            std::thread::sleep(SOON);
        }
        Ok(())
    }
}
