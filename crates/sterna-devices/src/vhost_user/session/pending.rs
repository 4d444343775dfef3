//! Waits before rings stop: for unread kicks, and for entries that were not returned.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::super::ended;
use super::super::error::VhostUserError;
use super::super::kind::DeviceKind;
use super::{ActiveRing, Serving, Session};

/// Time limit of a stop for kicks, if the back end reads kicks.
const KICKS_LIMIT: Duration = Duration::from_millis(100);
/// The same limit for a back end that was never seen to read a kick. It may poll its rings.
const POLLED_LIMIT: Duration = Duration::from_millis(2);
/// Time limit of a stop for entries that the back end has not returned. A slow disk can cause such a delay.
const RETURNS_LIMIT: Duration = Duration::from_secs(10);
const RETURNS_STEP: Duration = Duration::from_micros(200);

impl Session {
    /// Waits until the back end has returned all entries that the guest made available. The guest is paused.
    /// A back end that processes an entry when its ring stops may return it too late, or fail when it does
    /// (`specs/vhost-user.md §1.3`). After the time limit no ring has been stopped, and the guest can resume.
    pub(super) fn drain(&mut self) -> Result<(), VhostUserError> {
        let begin = Instant::now();
        // Only for kinds that return every available entry soon.
        let answers_all = self.kind.as_ref().is_some_and(DeviceKind::answers_all);
        for index in 0..self.rings.len() {
            let ActiveRing { ring, serving, .. } = self.rings[index];
            if !answers_all || serving != Serving::Yes {
                continue;
            }
            let memory = &self.memory;
            let outstanding = || {
                let (made, used) = (memory.read_u16(ring.available + 2), memory.read_u16(ring.used + 2));
                // A count above the ring's size breaks a rule of the driver. Such a ring is not waited for.
                let count = made.unwrap_or(0).wrapping_sub(used.unwrap_or(0));
                (1..=ring.size).contains(&count)
            };
            if outstanding() {
                // The guest may have been stopped immediately before its kick.
                let _ = self.events[index].kick.write(1);
            }
            while outstanding() {
                if begin.elapsed() > RETURNS_LIMIT || ended::has_come(&self.socket) {
                    return Err(self.owes(index));
                }
                std::thread::sleep(RETURNS_STEP);
            }
        }
        Ok(())
    }

    fn owes(&self, ring: usize) -> VhostUserError {
        if ended::has_come(&self.socket) {
            return VhostUserError::Ended { device: Arc::clone(&self.device) };
        }
        let rule = "the back end does not return the entries that it took; resume the guest and try again";
        VhostUserError::Ring { device: Arc::clone(&self.device), ring, rule }
    }

    /// Waits for entries that the back end took before it answered GET_VRING_BASE. The destination's back end
    /// would not return them, so that each entry is returned by exactly one back end. For devices whose rings
    /// cannot be drained.
    pub(super) fn wait_for_returns(&mut self, index: usize) -> Result<(), VhostUserError> {
        let begin = Instant::now();
        while self.rings[index].may_owe {
            let ring = self.rings[index].ring;
            let used = self.memory.read_u16(ring.used + 2);
            if used.is_none_or(|used| used == ring.base) {
                self.rings[index].may_owe = false;
                break;
            }
            if begin.elapsed() > RETURNS_LIMIT || ended::has_come(&self.socket) {
                return Err(self.owes(index));
            }
            std::thread::sleep(RETURNS_STEP);
        }
        Ok(())
    }

    /// Lets the back end's threads read the last kicks. Some threads end permanently if a ring is stopped before
    /// (`specs/vhost-user.md §1.3`). A back end that processes an entry would not answer a stop earlier
    /// either.
    pub(super) fn wait_for_kicks(&mut self) {
        const STEP: Duration = Duration::from_micros(100);
        let begin = Instant::now();
        let mut has_waited = false;
        // If the kicks cannot be checked, the stop proceeds as without this wait.
        while let Ok(Some(limit)) = self.look_at_kicks() {
            std::thread::sleep(STEP);
            has_waited = true;
            if begin.elapsed() > limit {
                break;
            }
        }
        if has_waited {
            // The back end may still be processing a kick that it has just read.
            std::thread::sleep(STEP);
        }
    }

    /// Longest time to wait for kicks that were not read yet. `None` if there are none.
    pub(super) fn look_at_kicks(&mut self) -> io::Result<Option<Duration>> {
        let kicks = Epoll::new()?;
        for (index, (ring, events)) in self.rings.iter().zip(&*self.events).enumerate() {
            if ring.serving != Serving::No {
                let readable = EpollEvent::new(EventSet::IN, index as u64);
                kicks.ctl(ControlOperation::Add, events.kick.as_raw_fd(), readable)?;
            }
        }
        let mut found = vec![EpollEvent::default(); self.rings.len().max(1)];
        let count = kicks.wait(0, &mut found)?;
        let pending: Vec<_> = found[..count].iter().map(|event| event.data() as usize).collect();
        for (index, ring) in self.rings.iter_mut().enumerate() {
            ring.takes_kicks |= ring.serving == Serving::Yes && !pending.contains(&index);
        }
        let limit = |index: &usize| if self.rings[*index].takes_kicks { KICKS_LIMIT } else { POLLED_LIMIT };
        Ok(pending.iter().map(limit).max())
    }
}
