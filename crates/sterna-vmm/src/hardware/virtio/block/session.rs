//! A disk at work: requests in flight, and their answers.

use std::io;
use std::os::fd::BorrowedFd;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};

use super::Disk;
use super::changes::Changes;
use super::engine::{DEPTH, Engine, Work};
use super::request::{Piece, Request, What};
use crate::hardware::virtio::backend::Session;
use crate::hardware::virtio::buffers::Buffers;
use crate::hardware::virtio::ring::{Broken, Ring};

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

pub(super) struct DiskSession<'a> {
    disk: &'a Disk,
    engine: Engine,
    /// By the engine's numbers.
    in_flight: Vec<Option<InFlight<'a>>>,
    /// Queues of which something was left, since nothing was free: nobody kicks for it.
    left: Vec<bool>,
    /// Requests that the host has failed.
    failures: u64,
}

struct InFlight<'a> {
    queue: usize,
    head: u16,
    status: Buffers<'a>,
    rest: Rest<'a>,
}

/// What is left to do of a request, should a call do a part of it.
enum Rest<'a> {
    /// From this byte on; so many bytes were read before.
    Read(u64, Buffers<'a>, usize),
    Write(u64, Buffers<'a>),
    Flush,
    Discard(Piece),
    /// Should the file not know this way, it is tried by another one.
    WriteZeroes(Piece),
}

impl Rest<'_> {
    /// The kernel is done with it: guest memory may have changed, or the disk.
    fn was_done(&self, changes: &Changes) {
        match self {
            Self::Read(_, to, _) => to.were_written(),
            Self::Write(at, from) => changes.written(*at, from.len() as u64),
            Self::Discard(piece) | Self::WriteZeroes(piece) => changes.written(piece.start, piece.length),
            Self::Flush => {}
        }
    }
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

    /// Takes what a queue has, as much as there is room for.
    fn take(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        let image = &self.disk.image;
        loop {
            rings[queue].ignore_kicks()?;
            while let Some(number) = self.engine.free() {
                let Some(chain) = rings[queue].pop()? else { break };
                let request = Request::of(chain, image.len_bytes(), image.is_read_only());
                let request = request.map_err(|(head, why)| rings[queue].refuse(head, why))?;
                self.begin(rings, queue, number, request)?;
            }
            self.engine.submit()?;
            if self.engine.free().is_none() {
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
        let (work, rest) = match what {
            What::Read(at, to) => (Work::Read(to.vectors(), at), Rest::Read(at, to, 0)),
            What::Write(at, from) => (Work::Write(from.vectors(), at), Rest::Write(at, from)),
            What::Flush => (Work::Flush, Rest::Flush),
            What::Discard(piece) => (allocate(PUNCH, piece), Rest::Discard(piece)),
            What::WriteZeroes(piece) if piece.may_unmap => (allocate(PUNCH, piece), Rest::WriteZeroes(piece)),
            What::WriteZeroes(piece) => (allocate(ZERO, piece), Rest::WriteZeroes(piece)),
            What::Identify(to) => {
                let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
                id.iter_mut().zip(self.disk.id.bytes()).for_each(|(to, from)| *to = from);
                let written = to.write(&id);
                return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_OK, written);
            }
            What::Unknown => return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_UNSUPP, 0),
            What::Wrong => return answer(&mut rings[queue], head, &status, VIRTIO_BLK_S_IOERR, 0),
        };
        self.in_flight[number] = Some(InFlight { queue, head, status, rest });
        self.hand_over(number, work)
    }

    /// A guest can ask for what fails as often as it likes.
    fn note_failure(&mut self, failed: Option<&str>) {
        let Some(error) = failed else { return };
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let (disk, times) = (&self.disk.id, self.failures);
            tracing::warn!(disk, error, times, "requests of a disk fail on this host");
        }
    }

    fn hand_over(&mut self, number: usize, work: Work) -> Result<(), Broken> {
        // SAFETY: the vectors are guest memory, which the worker's VM keeps mapped; the engine is dropped before, and waits
        // for what is in flight.
        unsafe { self.engine.begin(number, work) }?;
        Ok(())
    }

    /// Answers what is done, and takes what was left.
    fn go_on(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        loop {
            self.answer_done(rings)?;
            let left = self.left.iter().position(|is_left| *is_left);
            let Some(queue) = left.filter(|_| self.engine.free().is_some()) else { return Ok(()) };
            self.left[queue] = false;
            self.take(rings, queue)?;
        }
    }

    /// Answers what is done.
    fn answer_done(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        while let Some((number, result)) = self.engine.next_done() {
            let Some(done) = self.in_flight[number].take() else { continue };
            let failed = result.as_ref().err().map(ToString::to_string);
            match after(done, result, &self.disk.changes) {
                After::More(more, work) => {
                    self.in_flight[number] = Some(more);
                    self.hand_over(number, work)?;
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
        // Some is done at once.
        self.go_on(rings)
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        self.engine.event()
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        self.go_on(rings)
    }

    fn finish(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        while !self.engine.is_idle() {
            self.engine.wait()?;
            self.answer_done(rings)?;
        }
        Ok(())
    }
}

impl Drop for DiskSession<'_> {
    /// What is in flight when the driver has broken a rule has no answer, but it has written guest memory.
    fn drop(&mut self) {
        self.engine.drain();
        let changes = &self.disk.changes;
        self.in_flight.iter().flatten().for_each(|in_flight| in_flight.rest.was_done(changes));
    }
}

enum After<'a> {
    /// A call has done a part of it.
    More(InFlight<'a>, Work),
    Answer {
        queue: usize,
        head: u16,
        status: Buffers<'a>,
        code: u32,
        written: usize,
    },
}

fn after<'a>(done: InFlight<'a>, result: io::Result<usize>, changes: &Changes) -> After<'a> {
    let InFlight { queue, head, status, rest } = done;
    // A call that fails may have written some of it.
    rest.was_done(changes);
    let (code, written) = match (rest, result) {
        (Rest::Read(at, mut to, before), Ok(moved)) if moved > 0 => {
            if moved < to.len() {
                let _ = to.split_front(moved);
                let (at, before) = (at + moved as u64, before + moved);
                let work = Work::Read(to.vectors(), at);
                let rest = Rest::Read(at, to, before);
                return After::More(InFlight { queue, head, status, rest }, work);
            }
            (VIRTIO_BLK_S_OK, before + moved)
        }
        (Rest::Write(at, mut from), Ok(moved)) if moved > 0 => {
            if moved < from.len() {
                let _ = from.split_front(moved);
                let at = at + moved as u64;
                let work = Work::Write(from.vectors(), at);
                return After::More(InFlight { queue, head, status, rest: Rest::Write(at, from) }, work);
            }
            (VIRTIO_BLK_S_OK, 0)
        }
        // Nothing moved: the file has become shorter, or the disk is full.
        (Rest::Read(..) | Rest::Write(..), Ok(_)) => (VIRTIO_BLK_S_IOERR, 0),
        (Rest::Flush | Rest::Discard(_) | Rest::WriteZeroes(_), Ok(_)) => (VIRTIO_BLK_S_OK, 0),
        // Some file systems know one of the two ways only, and a hole is zero as well.
        (Rest::WriteZeroes(piece), Err(error))
            if error.raw_os_error() == Some(libc::EOPNOTSUPP) && !piece.may_unmap =>
        {
            let piece = Piece { may_unmap: true, ..piece };
            let rest = Rest::WriteZeroes(piece);
            return After::More(InFlight { queue, head, status, rest }, allocate(PUNCH, piece));
        }
        (_, Err(error)) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => (VIRTIO_BLK_S_UNSUPP, 0),
        (_, Err(_)) => (VIRTIO_BLK_S_IOERR, 0),
    };
    After::Answer { queue, head, status, code, written }
}

fn allocate(mode: i32, piece: Piece) -> Work {
    Work::Allocate(mode, piece.start, piece.length)
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
