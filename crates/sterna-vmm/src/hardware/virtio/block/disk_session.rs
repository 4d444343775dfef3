//! A disk at work: takes requests from the queues and answers them.

mod after;

use std::os::fd::BorrowedFd;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};

use self::after::{After, InFlight, after};
use super::Disk;
use super::engine::{DEPTH, Engine};
use super::request::{Request, What};
use super::rest::Rest;
use crate::hardware::virtio::backend::Session;
use crate::hardware::virtio::buffers::Buffers;
use crate::hardware::virtio::ring::{Broken, Ring};

pub(super) struct DiskSession<'a> {
    disk: &'a Disk,
    engine: Engine,
    /// Requests in flight, indexed by the engine's numbers.
    in_flight: Vec<Option<InFlight<'a>>>,
    /// Queues with requests that were not taken because the engine was full. The driver sends no kick for
    /// them.
    left: Vec<bool>,
    /// Number of requests that the host failed.
    failures: u64,
}

impl<'a> DiskSession<'a> {
    pub(super) fn new(disk: &'a Disk, engine: Engine) -> Self {
        Self {
            disk,
            engine,
            in_flight: (0..DEPTH).map(|_| None).collect(),
            left: vec![false; disk.queues.into()],
            failures: 0,
        }
    }

    /// Takes requests from a queue as long as there is room. If requests are served synchronously, it returns
    /// after one to let other queues work, because the guest can add requests without end.
    fn take(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        let image = &self.disk.image;
        let mut room = if image.is_raw() && self.engine.event().is_some() { usize::MAX } else { 1 };
        loop {
            rings[queue].ignore_kicks()?;
            while let Some(number) = self.engine.free().filter(|_| room > 0 && self.disk.changes.have_room())
            {
                let Some(chain) = rings[queue].pop()? else { break };
                room -= 1;
                let request = Request::of(chain, image.len_bytes(), image.is_read_only());
                let request = request.map_err(|(head, why)| rings[queue].refuse(head, why))?;
                self.begin(rings, queue, number, request)?;
            }
            self.engine.submit()?;
            if room == 0 || self.engine.free().is_none() || !self.disk.changes.have_room() {
                self.left[queue] = true;
                return Ok(());
            }
            if !rings[queue].expect_kicks()? {
                return Ok(());
            }
        }
    }

    fn begin(
        &mut self,
        rings: &mut [Ring<'a>],
        queue: usize,
        number: usize,
        request: Request<'a>,
    ) -> Result<(), Broken> {
        let Request { head, status, what } = request;
        let rest = match what {
            What::Read(at, to) => Rest::Read(at, to, 0),
            What::Write(at, from) => Rest::Write(at, from),
            What::Flush => Rest::Flush,
            What::Discard(piece) => Rest::Discard(piece),
            What::WriteZeroes(piece) => Rest::WriteZeroes(piece),
            What::Identify(to) => {
                let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
                id.iter_mut().zip(self.disk.id.bytes()).for_each(|(to, from)| *to = from);
                let written = to.write(&id);
                return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_OK, written);
            }
            What::Unknown => return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_UNSUPP, 0),
            What::Wrong => return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_IOERR, 0),
        };
        self.hand_over(number, InFlight { queue, head, status, rest })
    }

    /// Logs at powers of two only. A guest can repeat a failing request without limit.
    fn note_failure(&mut self, failed: Option<&str>) {
        let Some(error) = failed else { return };
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let (disk, times) = (&self.disk.id, self.failures);
            tracing::warn!(disk, error, times, "requests of a disk fail on this host");
        }
    }

    fn hand_over(&mut self, number: usize, request: InFlight<'a>) -> Result<(), Broken> {
        let rest = &self.in_flight[number].insert(request).rest;
        if self.disk.image.is_raw() {
            // SAFETY: the vectors are guest memory, which the worker's VM keeps mapped. The engine is dropped
            // before the VM and waits for the requests in flight.
            unsafe { self.engine.begin(number, rest.work()) }?;
        } else {
            self.engine.note_done(number, rest.carry_out(&self.disk.image));
        }
        Ok(())
    }

    /// Whether the engine has room for a request. The checkpoint of a protected guest must have room too.
    fn may_take(&self) -> bool {
        self.engine.free().is_some() && self.disk.changes.have_room()
    }

    /// Answers completed requests, then takes requests that were left in the queues.
    fn go_on(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        self.answer_done(rings)?;
        for queue in 0..rings.len() {
            if self.may_take() && std::mem::take(&mut self.left[queue]) {
                self.take(rings, queue)?;
            }
        }
        self.answer_done(rings)
    }

    /// Answers the requests that the engine has completed.
    fn answer_done(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        while let Some((number, result)) = self.engine.next_done() {
            let Some(done) = self.in_flight[number].take() else { continue };
            let failed = result.as_ref().err().map(ToString::to_string);
            match after(done, result, &self.disk.changes) {
                After::More(more) => {
                    self.hand_over(number, more)?;
                    self.engine.submit()?;
                }
                After::Answer { queue, head, status, code, written } => {
                    self.note_failure(failed.as_deref().filter(|_| code == VIRTIO_BLK_S_IOERR));
                    answer(&mut rings[queue], head, &status, code, written)?;
                }
            }
        }
        Ok(())
    }
}

impl<'a> Session<'a> for DiskSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        self.take(rings, queue)?;
        // Some requests are completed immediately.
        self.go_on(rings)
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        self.engine.event().into_iter().chain([self.disk.changes.room()]).collect()
    }

    fn has_more(&self) -> bool {
        self.left.contains(&true) && self.may_take()
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        self.go_on(rings)
    }

    fn finish(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        while !self.engine.is_idle() {
            self.engine.wait()?;
            self.answer_done(rings)?;
        }
        // Writes back now, so that a crash of the machine loses nothing that a raw file would keep. Data that
        // cannot be written stays for the guest's next flush or for the release of the lock. These fail if it
        // still cannot be written.
        if let Err(error) = self.disk.image.write_back() {
            tracing::error!(disk = self.disk.id, %error, "the disk's file lacks some of the guest's writes");
        }
        Ok(())
    }
}

impl Drop for DiskSession<'_> {
    /// Waits for the requests in flight and records their writes. After a driver broke a rule they get no
    /// answer, but they may have written guest memory.
    fn drop(&mut self) {
        self.engine.drain();
        let changes = &self.disk.changes;
        self.in_flight.iter().flatten().for_each(|in_flight| in_flight.rest.was_done(changes));
    }
}

fn answer(
    ring: &mut Ring<'_>,
    head: u16,
    status: &Buffers<'_>,
    code: u32,
    written: usize,
) -> Result<(), Broken> {
    status.write(&[code as u8]);
    ring.push(head, written as u32 + 1)?;
    ring.notify()
}

#[cfg(test)]
mod tests;
