//! Reads and writes a disk's file with io_uring. If the host has no io_uring, calls follow one after the
//! other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, opcode, squeue, types};
use sterna_disk::Image;
use vmm_sys_util::eventfd::EventFd;

/// Highest number of operations in flight.
pub(super) const DEPTH: usize = 256;
/// Highest number of operations without io_uring that are completed before the first is answered.
const DEPTH_AT_ONCE: usize = 16;

/// An operation on the file.
pub(super) enum Work {
    /// Reads into these vectors, from this byte of the file.
    Read(Vec<libc::iovec>, u64),
    Write(Vec<libc::iovec>, u64),
    Flush,
    /// `fallocate`: mode, first byte, number of bytes.
    Allocate(i32, u64, u64),
}

/// Performs operations on one file.
pub(super) struct Engine {
    file: RawFd,
    ring: Option<(IoUring, EventFd)>,
    /// Operations in flight, by number. They keep the vectors, which the kernel reads.
    slots: Vec<Option<Work>>,
    in_flight: usize,
    /// Results of operations that were completed without a ring.
    done: VecDeque<(usize, io::Result<usize>)>,
}

impl Engine {
    /// An engine for `image`, which must stay open as long as the engine lives.
    pub(super) fn new(image: &Image) -> Self {
        let mut engine = Self::without_ring(image);
        if !image.is_raw() {
            engine.slots.truncate(DEPTH_AT_ONCE);
            return engine;
        }
        match Self::ring() {
            Ok(ring) => engine.ring = Some(ring),
            Err(error) => {
                tracing::info!(%error, "this host has no io_uring: a disk performs one request at a time")
            }
        }
        engine
    }

    /// An engine that does not use io_uring.
    pub(super) fn without_ring(image: &Image) -> Self {
        Self {
            file: image.file().as_raw_fd(),
            ring: None,
            slots: (0..DEPTH).map(|_| None).collect(),
            in_flight: 0,
            done: VecDeque::new(),
        }
    }

    fn ring() -> io::Result<(IoUring, EventFd)> {
        let ring = IoUring::new(DEPTH as u32)?;
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok((ring, event))
    }

    /// Reduces the number of operations in flight.
    #[cfg(test)]
    pub(super) fn of_depth(mut self, depth: usize) -> Self {
        self.slots.truncate(depth);
        self
    }

    /// An event that becomes readable when an operation may have completed. `None` without io_uring.
    pub(super) fn event(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: `self` keeps the event open, and is borrowed for as long as the result.
        self.ring.as_ref().map(|(_, event)| unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) })
    }

    /// A number that no operation in flight uses. `None` if the engine is full.
    pub(super) fn free(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Begins an operation under a [free](Self::free) number. [`Self::submit`] hands it to the kernel.
    ///
    /// # Safety
    /// The vectors' memory must stay mapped until [`Self::next_done`] gives the number back, or the engine is dropped.
    pub(super) unsafe fn begin(&mut self, number: usize, work: Work) -> io::Result<()> {
        let work = self.slots[number].insert(work);
        let Some((ring, _)) = &mut self.ring else {
            self.done.push_back((number, at_once(self.file, work)));
            self.in_flight += 1;
            return Ok(());
        };
        let entry = entry(self.file, work).user_data(number as u64);
        // SAFETY: the vectors stay in their slot, and the caller keeps their memory mapped. The file is open.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            self.slots[number] = None;
            return Err(io::Error::other("io_uring: its queue is full"));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Records the result of an operation that the caller performed itself under a free number. Only for an
    /// engine without io_uring.
    pub(super) fn note_done(&mut self, number: usize, result: io::Result<usize>) {
        // Any kind of operation reserves the number.
        self.slots[number] = Some(Work::Flush);
        self.done.push_back((number, result));
        self.in_flight += 1;
    }

    /// Hands the begun operations to the kernel.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        let Some((ring, _)) = &mut self.ring else { return Ok(()) };
        loop {
            match ring.submit() {
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
                // The kernel may stop at an operation that it refuses. That operation is then complete.
                Ok(_) if ring.submission().is_empty() => return Ok(()),
                Ok(_) => {}
            }
        }
    }

    /// The number and the result (bytes moved) of a completed operation.
    pub(super) fn next_done(&mut self) -> Option<(usize, io::Result<usize>)> {
        let (number, result) = match &mut self.ring {
            Some((ring, event)) => next_of(ring, event)?,
            None => self.done.pop_front()?,
        };
        self.slots.get_mut(number)?.take()?;
        self.in_flight -= 1;
        Some((number, result))
    }

    /// Waits until no operation is in flight. The kernel may write guest memory until then. Discards the
    /// results.
    pub(super) fn drain(&mut self) {
        while self.in_flight > 0 {
            if let Err(error) = self.wait() {
                // The kernel may still write to the memory, and no call can tell until when. Therefore the
                // process must end.
                tracing::error!(%error, "cannot wait for a disk's requests");
                std::process::abort();
            }
            while self.next_done().is_some() {}
        }
    }

    /// Waits until an operation has completed.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        let Some((ring, _)) = &self.ring else { return Ok(()) };
        loop {
            match ring.submit_and_wait(1) {
                Err(error) if is_passing(&error) => {}
                other => return other.map(drop),
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.drain();
    }
}

fn next_of(ring: &mut IoUring, event: &EventFd) -> Option<(usize, io::Result<usize>)> {
    let first = ring.completion().next();
    let done = match first {
        Some(done) => done,
        None => {
            // The event is read first, so that a later completion signals it again.
            let _ = event.read();
            ring.completion().next()?
        }
    };
    let moved = usize::try_from(done.result());
    let result = moved.map_err(|_| io::Error::from_raw_os_error(-done.result()));
    Some((usize::try_from(done.user_data()).ok()?, result))
}

fn entry(file: RawFd, work: &Work) -> squeue::Entry {
    let file = types::Fd(file);
    match work {
        Work::Read(vectors, at) => {
            opcode::Readv::new(file, vectors.as_ptr(), vectors.len() as u32).offset(*at).build()
        }
        Work::Write(vectors, at) => {
            opcode::Writev::new(file, vectors.as_ptr(), vectors.len() as u32).offset(*at).build()
        }
        Work::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        Work::Allocate(mode, start, length) => {
            opcode::Fallocate::new(file, *length).offset(*start).mode(*mode).build()
        }
    }
}

fn at_once(file: RawFd, work: &Work) -> io::Result<usize> {
    // SAFETY: the file is open, and the caller of `begin` keeps the vectors' memory mapped.
    let moved = unsafe {
        match work {
            Work::Read(vectors, at) => {
                libc::preadv(file, vectors.as_ptr(), vectors.len() as i32, *at as libc::off_t)
            }
            Work::Write(vectors, at) => {
                libc::pwritev(file, vectors.as_ptr(), vectors.len() as i32, *at as libc::off_t)
            }
            Work::Flush => libc::fdatasync(file) as isize,
            Work::Allocate(mode, start, length) => {
                libc::fallocate(file, *mode, *start as libc::off_t, *length as libc::off_t) as isize
            }
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
