//! Bytes that go from one channel to another. Where the kernel can, they are never copied: `splice(2)` takes the pages that
//! hold them out of one socket into a pipe, and out of the pipe into the other socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::Channel;
use crate::group::Wait;
use crate::{Direction, TransportError, socket};

/// Bytes on their way from one channel to another ([`Channel::read_piece`], [`Channel::write_piece`]). What it holds when
/// it is dropped is lost.
#[derive(Debug)]
pub struct Piece {
    most: usize,
    /// Those that lie in this process; they come first.
    copied: Vec<u8>,
    /// None: all are copied.
    pipe: Option<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    holds: usize,
}

impl Piece {
    /// An empty one, for `most` bytes at a time from `from` to `to`. They are copied if either end speaks TLS or is not a
    /// socket, if the host refuses a pipe, and in a program that a signal tells of a peer that is gone (`SIGPIPE`), which
    /// only a copy can avoid.
    pub fn between(from: &Channel, to: &Channel, most: usize) -> Self {
        let splices = [from, to].iter().all(|end| end.socket().is_some() && !end.is_tls());
        let pipe = if splices && socket::ignores_sigpipe() { Pipe::new(most) } else { None };
        Self { most, copied: Vec::new(), pipe }
    }

    /// An empty one, whose bytes are copied.
    pub fn copying(most: usize) -> Self {
        Self { most, copied: Vec::new(), pipe: None }
    }

    /// Bytes that it holds.
    pub fn len(&self) -> usize {
        self.copied.len() + self.pipe.as_ref().map_or(0, |pipe| pipe.holds)
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the next bytes are spliced.
    pub fn is_spliced(&self) -> bool {
        self.pipe.is_some()
    }
}

impl Channel {
    /// Reads what is there behind what the piece holds, at least one byte, at most what the piece is for; 0 means that the
    /// peer closed.
    ///
    /// # Errors
    /// As [`Channel::read_some`].
    pub fn read_piece(&self, piece: &mut Piece) -> Result<usize, TransportError> {
        if piece.is_empty()
            && !self.has_peeked.load(Ordering::Acquire)
            && let Some((pipe, socket)) = piece.pipe.as_mut().zip(self.spliceable())
        {
            let into = pipe.write.as_fd();
            if let Some(moved) = self.splice(Direction::Read, socket, into, piece.most)? {
                pipe.holds += moved;
                self.count_read(moved);
                return Ok(moved);
            }
            // This kernel cannot.
            piece.pipe = None;
        }
        self.take_out(piece)?;
        let before = piece.copied.len();
        piece.copied.resize(before + piece.most, 0);
        let read = self.read_some(&mut piece.copied[before..]);
        piece.copied.truncate(before + *read.as_ref().unwrap_or(&0));
        read
    }

    /// Writes all that the piece holds, after which it is empty. After an error it may hold a part.
    ///
    /// # Errors
    /// As [`Channel::write_all`].
    pub fn write_piece(&self, piece: &mut Piece) -> Result<(), TransportError> {
        self.write_all(&piece.copied)?;
        piece.copied.clear();
        while let Some(pipe) = piece.pipe.as_mut().filter(|pipe| pipe.holds > 0) {
            let moved = match self.spliceable() {
                Some(socket) => self.splice(Direction::Write, pipe.read.as_fd(), socket, pipe.holds)?,
                None => None,
            };
            match moved {
                Some(moved) => {
                    pipe.holds -= moved;
                    self.written.fetch_add(moved as u64, Ordering::Relaxed);
                }
                None => {
                    self.take_out(piece)?;
                    piece.pipe = None;
                    self.write_all(&piece.copied)?;
                    piece.copied.clear();
                }
            }
        }
        Ok(())
    }

    /// Its socket, if the kernel may move bytes from or to it that this process does not see.
    fn spliceable(&self) -> Option<BorrowedFd<'_>> {
        self.socket().filter(|_| !self.is_tls())
    }

    /// One system call that moved something, or the end, or an error. None: the kernel cannot do it between these two.
    fn splice(
        &self,
        direction: Direction,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        most: usize,
    ) -> Result<Option<usize>, TransportError> {
        let mut wait = Wait::default();
        loop {
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            // It waits as other calls do: the socket is one that blocks, with the limit that is set on it.
            let result = splice(from, None, to, None, most, SpliceFlags::MOVE);
            // Whatever is said after a shutdown of ours, it is that shutdown's doing.
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            match result {
                Ok(0) if direction == Direction::Write => {
                    return Err(self.system("splice", io::ErrorKind::WriteZero.into()));
                }
                Ok(moved) => return Ok(Some(moved)),
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => return Ok(None),
                Err(error) => self.judge(direction, error.into(), &mut wait)?,
            }
        }
    }

    /// Copies what lies in the piece's pipe behind what is copied already.
    fn take_out(&self, piece: &mut Piece) -> Result<(), TransportError> {
        let Some(pipe) = piece.pipe.as_mut() else { return Ok(()) };
        while pipe.holds > 0 {
            let before = piece.copied.len();
            piece.copied.resize(before + pipe.holds, 0);
            // It does not wait: they are there.
            let read = match rustix::io::read(&pipe.read, &mut piece.copied[before..]) {
                Err(Errno::INTR) => Ok(0),
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                read => read.map_err(io::Error::from),
            };
            piece.copied.truncate(before + *read.as_ref().unwrap_or(&0));
            pipe.holds -= read.map_err(|error| self.system("read", error))?;
        }
        Ok(())
    }
}

impl Pipe {
    /// None if the host refuses one.
    fn new(room: usize) -> Option<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        // A host that refuses it gives a smaller one, through which as much goes in more pieces.
        let _ = fcntl_setpipe_size(&write, room);
        Some(Self { read, write, holds: 0 })
    }
}
