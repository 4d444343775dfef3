//! Forwards bytes between two channels without a copy, for programs that relay a migration.
//!
//! `splice(2)` moves the pages that contain the bytes from one socket into a pipe, and from the pipe into the other
//! socket. If the kernel cannot do that, the bytes are copied through a buffer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::Channel;
use crate::error::{Direction, TransportError};
use crate::group::Wait;
use crate::socket;

/// Bytes in transit from one channel to another ([`Channel::read_piece`], [`Channel::write_piece`]).
///
/// If a piece is dropped, the bytes in it are lost.
#[derive(Debug)]
pub struct Piece {
    most: usize,
    /// Bytes in this process's memory. They precede those in the pipe.
    copied: Vec<u8>,
    /// `None` if all bytes are copied.
    pipe: Option<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    holds: usize,
}

impl Piece {
    /// An empty piece that moves up to `most` bytes at a time from `from` to `to`.
    ///
    /// The bytes are copied, not spliced, in three cases:
    /// * an end uses TLS or is not a socket;
    /// * the host refuses a pipe;
    /// * the program does not ignore `SIGPIPE`. Only a copying write can suppress that signal when the peer has
    ///   closed.
    pub fn between(from: &Channel, to: &Channel, most: usize) -> Self {
        let splices = [from, to].iter().all(|end| end.socket().is_some() && !end.is_tls());
        let pipe = if splices && socket::ignores_sigpipe() { Pipe::new(most) } else { None };
        Self { most, copied: Vec::new(), pipe }
    }

    /// An empty piece that always copies, at most `most` bytes at a time.
    pub fn copying(most: usize) -> Self {
        Self { most, copied: Vec::new(), pipe: None }
    }

    /// Number of bytes in the piece.
    pub fn len(&self) -> usize {
        self.copied.len() + self.pipe.as_ref().map_or(0, |pipe| pipe.holds)
    }

    /// Whether the piece contains no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the next bytes will be spliced rather than copied.
    pub fn is_spliced(&self) -> bool {
        self.pipe.is_some()
    }
}

impl Channel {
    /// Reads available bytes and appends them to the piece: at least one, at most its size.
    ///
    /// Returns 0 if the peer closed.
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
            // This kernel cannot splice from this socket.
            piece.pipe = None;
        }
        self.take_out(piece)?;
        let before = piece.copied.len();
        piece.copied.resize(before + piece.most, 0);
        let read = self.read_some(&mut piece.copied[before..]);
        piece.copied.truncate(before + *read.as_ref().unwrap_or(&0));
        read
    }

    /// Writes all bytes of the piece and empties it. After an error the piece may contain the unwritten bytes.
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

    /// The socket, if the kernel may move its bytes past this process (no TLS).
    fn spliceable(&self) -> Option<BorrowedFd<'_>> {
        self.socket().filter(|_| !self.is_tls())
    }

    /// One `splice` that moved bytes, found the end or failed. `None`: the kernel cannot splice between these two.
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
            // The call blocks as the other calls do: the socket is in blocking mode, with the time limit set on it.
            let result = splice(from, None, to, None, most, SpliceFlags::MOVE);
            // After a shutdown of this side, every result is a consequence of that shutdown.
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

    /// Copies the bytes in the piece's pipe to the end of the copied ones.
    fn take_out(&self, piece: &mut Piece) -> Result<(), TransportError> {
        let Some(pipe) = piece.pipe.as_mut() else { return Ok(()) };
        while pipe.holds > 0 {
            let before = piece.copied.len();
            piece.copied.resize(before + pipe.holds, 0);
            // The read does not block: the pipe contains these bytes.
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
    /// Makes a pipe for `room` bytes; `None` if the host refuses.
    fn new(room: usize) -> Option<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        // If the host refuses the size, the pipe is smaller, and the same bytes take more calls.
        let _ = fcntl_setpipe_size(&write, room);
        Some(Self { read, write, holds: 0 })
    }
}
