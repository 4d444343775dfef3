//! io_uring: several pieces of I/O in progress while the thread continues.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, opcode, squeue, types};

/// One piece of I/O: a range of memory and its offset in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub write: bool,
    /// Offset in the file.
    pub at: u64,
    pub memory: *mut u8,
    pub length: usize,
    /// Index of the queue's buffer, if the memory is one.
    pub buffer: Option<usize>,
}

// SAFETY: the pointer only identifies memory. The code that pushed the piece keeps that memory alive and unshared.
unsafe impl Send for Piece {}

/// An io_uring with one slot for each piece in progress.
pub(super) struct Ring {
    ring: IoUring,
    file: RawFd,
    slots: Vec<Option<Piece>>,
    /// Memory registered with the kernel: (start, bytes), by index.
    registered: Vec<(usize, usize)>,
}

impl Ring {
    /// A ring for `file`, which must stay open while the ring exists. Fails if there is no io_uring.
    pub(crate) fn new(file: BorrowedFd<'_>, depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ring = IoUring::builder()
            // Completions are processed when this thread enters the kernel, without interrupting it.
            .setup_coop_taskrun()
            .build(entries)
            // Linux before 5.19 does not have the flag.
            .or_else(|_| IoUring::new(entries))?;
        Ok(Self { ring, file: file.as_raw_fd(), slots: vec![None; depth], registered: Vec::new() })
    }

    /// Lets the kernel map memory once instead of for every piece. Returns whether it did.
    ///
    /// A refusal (limit of locked memory) is harmless: the kernel then maps the memory for each piece.
    ///
    /// # Safety
    /// The memory must stay mapped while the ring exists.
    pub(crate) unsafe fn register(&mut self, memory: impl Iterator<Item = (*mut u8, usize)>) -> bool {
        /// The kernel's limit for one registered range: 1 GiB.
        const MOST: usize = 1 << 30;
        let mut vectors = Vec::new();
        for (start, length) in memory {
            for from in (0..length).step_by(MOST) {
                let iov_base = start.wrapping_add(from).cast();
                vectors.push(libc::iovec { iov_base, iov_len: MOST.min(length - from) });
            }
        }
        // SAFETY: the caller keeps the memory mapped. The kernel accesses it only for pieces that are pushed.
        if unsafe { self.ring.submitter().register_buffers(&vectors) }.is_err() {
            return false;
        }
        self.registered = vectors.iter().map(|vector| (vector.iov_base as usize, vector.iov_len)).collect();
        true
    }

    /// Whether a slot is free for another piece.
    pub(crate) fn has_room(&self) -> bool {
        self.slots.iter().any(Option::is_none)
    }

    /// Whether no piece is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    /// Starts a piece. A slot must be free ([`Ring::has_room`]).
    ///
    /// # Safety
    /// Until [`Ring::reap`] returns the piece, its memory must stay mapped. If the kernel reads it, only a guest
    /// may write it. If the kernel writes it, no reference to it may exist.
    pub(crate) unsafe fn push(&mut self, piece: Piece) -> io::Result<()> {
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            return Err(io::Error::other("io_uring: no free slot"));
        };
        let entry = self.entry(&piece).user_data(slot as u64);
        // SAFETY: the caller keeps the memory as required above. The descriptor is open while the ring exists.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("io_uring: the submission queue is full"))?;
        // From here on the kernel may use the piece's memory.
        self.slots[slot] = Some(piece);
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until a piece is done, and returns it with its result. One must be in progress ([`Ring::is_idle`]).
    pub(crate) fn reap(&mut self) -> io::Result<(Piece, io::Result<usize>)> {
        loop {
            if let Some(done) = self.ring.completion().next() {
                let slot = usize::try_from(done.user_data()).unwrap_or(usize::MAX);
                let Some(piece) = self.slots.get_mut(slot).and_then(Option::take) else {
                    return Err(io::Error::other("io_uring: an unexpected completion"));
                };
                let moved = match usize::try_from(done.result()) {
                    Ok(moved) => Ok(moved),
                    Err(_) => Err(io::Error::from_raw_os_error(-done.result())),
                };
                return Ok((piece, moved));
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn entry(&self, piece: &Piece) -> squeue::Entry {
        let file = types::Fd(self.file);
        // Cannot truncate: the queue's pieces are far below 4 GiB.
        let (memory, length) = (piece.memory, piece.length as u32);
        match (self.index_of(piece), piece.write) {
            (Some(index), true) => {
                opcode::WriteFixed::new(file, memory, length, index).offset(piece.at).build()
            }
            (Some(index), false) => {
                opcode::ReadFixed::new(file, memory, length, index).offset(piece.at).build()
            }
            (None, true) => opcode::Write::new(file, memory, length).offset(piece.at).build(),
            (None, false) => opcode::Read::new(file, memory, length).offset(piece.at).build(),
        }
    }

    /// Index of the registered memory that contains the whole piece.
    fn index_of(&self, piece: &Piece) -> Option<u16> {
        let start = piece.memory as usize;
        let holds = |&(from, length): &(usize, usize)| start >= from && start + piece.length <= from + length;
        self.registered.iter().position(holds).and_then(|index| u16::try_from(index).ok())
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
