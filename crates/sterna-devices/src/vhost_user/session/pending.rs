//! What is under way when rings are to stop: kicks that were not taken, entries that were not returned.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::super::ended;
use super::super::error::VhostUserError;
use super::super::kind::DeviceKind;
use super::{ActiveRing, Serving, Session};

/// How long a stop waits for kicks to be taken by a back end that takes them.
const KICKS_LIMIT: Duration = Duration::from_millis(100);
/// And by one that was never seen to take one: it may poll its rings.
const POLLED_LIMIT: Duration = Duration::from_millis(2);
/// How long a stop waits for entries that a back end has taken and not returned: a slow disk.
const RETURNS_LIMIT: Duration = Duration::from_secs(10);
const RETURNS_STEP: Duration = Duration::from_micros(200);

impl Session {
    /// Waits until the back end has returned all that the guest, which stands still, has made available. One that works on
    /// something when a ring stops may return it too late, or break when it does (`specs/vhost-user.md §1.3`). If it takes too
    /// long, nothing has been stopped, and the guest can go on.
    pub(super) fn drain(&mut self) -> Result<(), VhostUserError> {
        let begin = Instant::now();
        // Every entry that is made available is returned soon.
        let answers_all = self.kind.as_ref().is_some_and(DeviceKind::answers_all);
        for index in 0..self.rings.len() {
            let ActiveRing { ring, serving, .. } = self.rings[index];
            if !answers_all || serving != Serving::Yes {
                continue;
            }
            let memory = &self.memory;
            let outstanding = || {
                let (made, used) = (memory.read_u16(ring.available + 2), memory.read_u16(ring.used + 2));
                // More than fit into the ring: the driver breaks a rule, and nothing is to be expected of its ring.
                let count = made.unwrap_or(0).wrapping_sub(used.unwrap_or(0));
                (1..=ring.size).contains(&count)
            };
            if outstanding() {
                // The guest may have been stopped right before its kick.
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
        let rule = "the back end does not return the entries that it took; let the guest go on and try again";
        VhostUserError::Ring { device: Arc::clone(&self.device), ring, rule }
    }

    /// What a back end took before it answered GET_VRING_BASE nobody would return at the destination: each entry that is taken
    /// is returned by one. So that of devices whose rings cannot be drained is waited for.
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

    /// Lets the back end's threads see the last kicks: some end for ever if a ring is stopped between
    /// (`specs/vhost-user.md §1.3`). One that works on an entry would not answer a stop sooner either.
    pub(super) fn wait_for_kicks(&mut self) {
        const STEP: Duration = Duration::from_micros(100);
        let begin = Instant::now();
        let mut has_waited = false;
        // Without a look at them the stop is what it would be without the wait.
        while let Ok(Some(limit)) = self.look_at_kicks() {
            std::thread::sleep(STEP);
            has_waited = true;
            if begin.elapsed() > limit {
                break;
            }
        }
        if has_waited {
            // A kick that was taken just now is not yet looked after.
            std::thread::sleep(STEP);
        }
    }

    /// How long kicks may be waited for that nobody has taken yet, if there are any.
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
