//! One thread's queue of large reads and writes of a file, several in parallel.

use std::io;
use std::sync::Arc;

use sterna_ram::{GuestRam, RamBlock, RamError, RamFault};

use super::alignment::DIRECT_ALIGN;
use super::buffers::{BUFFER_BYTES, Buffers};
use super::page_file::{PageFile, Whole};
use super::ring::{Piece, Ring};
use super::system::failed;
use crate::error::TransportError;
use crate::parts::IoPart;
use crate::parts::Part;

/// Settings of a [`PageQueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueOptions {
    /// Maximum number of pieces in progress, 1 to 1024 (default 8).
    pub depth: usize,
    /// Use io_uring if it is available. Without it, each call returns only when its piece is done.
    pub io_uring: bool,
    /// Map all guest RAM in the kernel once, instead of each piece separately.
    ///
    /// This populates RAM that was never touched, and locks it in memory while the queue exists.
    pub register_ram: bool,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self { depth: 8, io_uring: true, register_ram: false }
    }
}

/// Writes and reads large pieces of a file, several in parallel. Each thread has its own queue.
///
/// Pieces are not ordered. Between two pieces that touch the same bytes, call [`PageQueue::drain`]. The failure of
/// a piece is returned by a later call, at the latest by `drain`. Every call after that fails too, because the
/// content of the file is unknown. Dropping a queue waits for the pieces in progress and discards their errors.
pub struct PageQueue {
    file: Arc<PageFile>,
    /// Keeps the memory of the pieces alive.
    ram: Option<GuestRam>,
    options: QueueOptions,
    engine: Engine,
    /// Allocated on first use.
    buffers: Option<Buffers>,
    /// Indices of the buffers that the kernel is not using.
    free: Vec<usize>,
    /// The buffer that is being filled: its index, its offset in the file, and its length.
    filling: Option<(usize, u64, usize)>,
    /// The first failure that no call has returned yet.
    failure: Option<TransportError>,
    /// Text of the failure that a call has returned.
    broken: Option<String>,
    moved_bytes: u64,
}

/// Chosen by the first piece, on the thread that uses the queue.
enum Engine {
    New,
    Ring(Box<Ring>),
    Plain,
}

impl PageQueue {
    /// A queue for bytes of this process only.
    pub fn new(file: &Arc<PageFile>, options: QueueOptions) -> Self {
        Self {
            file: Arc::clone(file),
            ram: None,
            options: QueueOptions { depth: options.depth.clamp(1, 1024), ..options },
            engine: Engine::New,
            buffers: None,
            free: Vec::new(),
            filling: None,
            failure: None,
            broken: None,
            moved_bytes: 0,
        }
    }

    /// A queue that also reads and writes windows of `ram`, in place.
    pub fn with_ram(file: &Arc<PageFile>, ram: &GuestRam, options: QueueOptions) -> Self {
        let mut queue = Self::new(file, options);
        queue.ram = Some(ram.clone());
        queue
    }

    /// The file that the queue reads and writes.
    pub fn file(&self) -> &Arc<PageFile> {
        &self.file
    }

    /// Number of bytes of the completed pieces.
    pub fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    /// Starts to write a window of guest RAM to byte `at` of the file.
    ///
    /// The window is `[offset, offset + length)` of RAM block `block`.
    ///
    /// The guest may write the range meanwhile. The file then contains old bytes, new bytes or a mixture.
    ///
    /// # Errors
    /// The failure of this piece or an earlier one: [`TransportError::DiskFull`], [`TransportError::System`].
    ///
    /// # Panics
    /// If the window is not in the RAM that was given to [`PageQueue::with_ram`].
    pub fn write_ram(
        &mut self,
        at: u64,
        block: usize,
        offset: u64,
        length: usize,
    ) -> Result<(), TransportError> {
        let memory = self.window(block, offset, length)?;
        self.send(Piece { write: true, at, memory, length, buffer: None })
    }

    /// Starts to read `[at, at + length)` of the file to `offset` of block `block`.
    ///
    /// The bytes are there after [`PageQueue::drain`].
    ///
    /// # Errors
    /// The failure of this piece or an earlier one: [`TransportError::FileEnd`], [`TransportError::System`].
    ///
    /// # Panics
    /// If the window is not in the RAM that was given to [`PageQueue::with_ram`].
    pub fn read_ram(
        &mut self,
        at: u64,
        block: usize,
        offset: u64,
        length: usize,
    ) -> Result<(), TransportError> {
        let memory = self.window(block, offset, length)?;
        self.send(Piece { write: false, at, memory, length, buffer: None })
    }

    /// Writes bytes of this process to byte `at` of the file. The bytes are copied into a buffer.
    ///
    /// Adjacent bytes are written together, so the write may start only with [`PageQueue::drain`].
    ///
    /// # Errors
    /// The failure of these bytes or earlier ones: [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn write_bytes(&mut self, at: u64, bytes: &[u8]) -> Result<(), TransportError> {
        self.write_copy(at, &IoPart::Bytes(bytes))
    }

    /// As [`PageQueue::write_bytes`], for bytes or for guest RAM. Both are copied.
    ///
    /// # Errors
    /// As [`PageQueue::write_bytes`].
    pub fn write_copy(&mut self, at: u64, part: &IoPart<'_>) -> Result<(), TransportError> {
        self.told()?;
        let length = part.raw().1;
        let mut done = 0;
        while done < length {
            let at = at + done as u64;
            let (index, start, filled) = match self.filling {
                Some((index, start, filled)) if start + filled as u64 == at => (index, start, filled),
                _ => {
                    self.send_filling()?;
                    (self.free_buffer()?, at, 0)
                }
            };
            // A buffer ends at a multiple of its size in the file, so that the next one starts aligned.
            let room = BUFFER_BYTES - (start % BUFFER_BYTES as u64) as usize - filled;
            let now = room.min(length - done);
            let Some(buffers) = &mut self.buffers else { return Err(self.internal("no buffers")) };
            // SAFETY: the buffer was taken from `free`, so no I/O on it is in progress.
            let to = unsafe { &mut buffers.bytes(index)[filled..filled + now] };
            match part {
                IoPart::Bytes(bytes) => to.copy_from_slice(&bytes[done..done + now]),
                IoPart::Ram(window) => {
                    let Some(window) = window.part(done, now) else { return Err(self.internal("a window")) };
                    window.copy_to(to).map_err(|fault| self.failed_memory(fault))?;
                }
            }
            self.filling = Some((index, start, filled + now));
            done += now;
            if now == room {
                self.send_filling()?;
            }
        }
        Ok(())
    }

    /// Waits until all pieces are done, so that later ones cannot overtake them.
    ///
    /// # Errors
    /// The first failure of any piece. Even then no piece is in progress, unless the ring itself has failed.
    pub fn drain(&mut self) -> Result<(), TransportError> {
        if let Err(error) = self.send_filling() {
            // Returned at the end, after the wait for all pieces.
            self.broken = None;
            self.failure.get_or_insert(error);
        }
        while !self.is_idle() {
            self.reap()?;
        }
        self.told()
    }

    /// The checked address of a window of guest RAM.
    fn window(&self, block: usize, offset: u64, length: usize) -> Result<*mut u8, TransportError> {
        let block = self.ram.as_ref().and_then(|ram| ram.blocks().get(block));
        match block.map(|block: &RamBlock| (block, block.slice(offset, length))) {
            Some((_, Ok(slice))) => Ok(slice.as_ptr()),
            Some((block, Err(RamError::Poisoned { page }))) => {
                let address = block.host_address() as usize + page.offset as usize;
                Err(self.failed_memory(RamFault { address }))
            }
            _ => panic!("a window that is not in the queue's RAM"),
        }
    }

    /// Makes the error for a page of guest RAM that has failed, before or during a copy.
    fn failed_memory(&self, fault: RamFault) -> TransportError {
        TransportError::FailedMemory { channel: self.file.path().display().to_string(), fault }
    }

    fn send(&mut self, piece: Piece) -> Result<(), TransportError> {
        let sent = self.told().and_then(|()| self.send_now(piece));
        sent.map_err(|error| self.note(error))
    }

    fn send_now(&mut self, piece: Piece) -> Result<(), TransportError> {
        let aligned = (piece.at | piece.length as u64 | piece.memory as u64).is_multiple_of(DIRECT_ALIGN);
        self.start();
        let Engine::Ring(_) = self.engine else { return self.do_now(piece, aligned) };
        if !aligned || u32::try_from(piece.length).is_err() {
            return self.do_now(piece, aligned);
        }
        while let Engine::Ring(ring) = &self.engine
            && !ring.has_room()
        {
            self.reap()?;
        }
        let Engine::Ring(ring) = &mut self.engine else { return self.do_now(piece, aligned) };
        // SAFETY: the memory is a window of `self.ram`, which this queue keeps alive and which is never borrowed.
        // Or it is a buffer taken from `free`, which no code touches until `reap` returns it. Drop waits for all
        // pieces before it releases either, and a leaked queue leaks both.
        let pushed = unsafe { ring.push(piece) };
        pushed.map_err(|error| failed(self.file.path(), "io_uring_enter", piece.at, error))
    }

    /// Chooses between io_uring and plain calls, once.
    fn start(&mut self) {
        if !matches!(self.engine, Engine::New) {
            return;
        }
        self.engine = Engine::Plain;
        // For I/O through the page cache, io_uring would only pass the pieces to kernel threads.
        if !self.options.io_uring || !self.file.is_direct() {
            return;
        }
        let Ok(mut ring) = Ring::new(self.file.fast(), self.options.depth) else { return };
        let mut memory: Vec<(*mut u8, usize)> = Vec::new();
        if let Some(buffers) = &self.buffers {
            memory.push((buffers.address(0), buffers.count() * BUFFER_BYTES));
        }
        if let Some(ram) = self.ram.as_ref().filter(|_| self.options.register_ram) {
            memory
                .extend(ram.blocks().iter().map(|block| (block.host_address(), block.len_bytes() as usize)));
        }
        if !memory.is_empty() {
            // SAFETY: buffers and RAM are dropped after the ring; see Drop.
            let _ = unsafe { ring.register(memory.into_iter()) };
        }
        self.engine = Engine::Ring(Box::new(ring));
    }

    /// Performs a piece with plain system calls.
    fn do_now(&mut self, piece: Piece, aligned: bool) -> Result<(), TransportError> {
        let done = self.plain(piece, aligned);
        if let Some(index) = piece.buffer {
            self.free.push(index);
        }
        if done.is_ok() {
            self.moved_bytes += piece.length as u64;
        }
        done
    }

    fn plain(&self, piece: Piece, aligned: bool) -> Result<(), TransportError> {
        // Unaligned bytes, and those that direct I/O refused, go through the page cache.
        let body = if aligned { piece.length } else { piece.length - (piece.length % DIRECT_ALIGN as usize) };
        let is_body_aligned = (piece.at | piece.memory as u64).is_multiple_of(DIRECT_ALIGN);
        if !aligned && is_body_aligned && body > 0 {
            self.plain(Piece { length: body, ..piece }, true)?;
            let tail = Piece {
                at: piece.at + body as u64,
                memory: piece.memory.wrapping_add(body),
                length: piece.length - body,
                ..piece
            };
            return self.cached(tail);
        }
        if !aligned {
            return self.cached(piece);
        }
        let part = [Whole(piece.memory, piece.length)];
        let done = if piece.write {
            self.file.write_fast(piece.at, &part)
        } else {
            // SAFETY: guest RAM, or a buffer that only this queue uses.
            unsafe { self.file.read_fast(piece.at, &part) }
        };
        match done {
            Err(TransportError::System { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                self.cached(piece)
            }
            done => done,
        }
    }

    fn cached(&self, piece: Piece) -> Result<(), TransportError> {
        let part = [Whole(piece.memory, piece.length)];
        if piece.write {
            return self.file.write_cached(piece.at, &part);
        }
        // SAFETY: guest RAM, or a buffer that only this queue uses.
        unsafe { self.file.read_cached(piece.at, &part) }
    }

    fn is_idle(&self) -> bool {
        match &self.engine {
            Engine::Ring(ring) => ring.is_idle(),
            Engine::New | Engine::Plain => true,
        }
    }

    /// Waits for one piece and records its result.
    fn reap(&mut self) -> Result<(), TransportError> {
        let Engine::Ring(ring) = &mut self.engine else { return Ok(()) };
        let (piece, moved) = match ring.reap() {
            Ok(reaped) => reaped,
            Err(error) => {
                let error = failed(self.file.path(), "io_uring_enter", 0, error);
                return Err(self.note(error));
            }
        };
        let done = match moved {
            Ok(moved) if moved == piece.length => Ok(()),
            // The kernel stopped early, perhaps at the end of the file or the disk. Plain calls do the rest, and
            // return the reason if they fail.
            Ok(moved) => {
                let moved = moved - moved % DIRECT_ALIGN as usize;
                let rest = Piece {
                    at: piece.at + moved as u64,
                    memory: piece.memory.wrapping_add(moved),
                    length: piece.length - moved,
                    ..piece
                };
                self.plain(rest, true)
            }
            // ECANCELED: the kernel has no thread for the request, for example because of the user's process limit.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EINVAL | libc::ECANCELED)
                ) =>
            {
                self.plain(piece, true)
            }
            Err(error) => {
                let call = if piece.write { "io_uring write" } else { "io_uring read" };
                Err(failed(self.file.path(), call, piece.at, error))
            }
        };
        if let Some(index) = piece.buffer {
            self.free.push(index);
        }
        match done {
            Ok(()) => self.moved_bytes += piece.length as u64,
            Err(error) => {
                self.failure.get_or_insert(error);
            }
        }
        Ok(())
    }

    /// Returns the first failure, or an error that the queue failed earlier.
    fn told(&mut self) -> Result<(), TransportError> {
        if let Some(error) = self.failure.take() {
            return Err(self.note(error));
        }
        match &self.broken {
            Some(text) => Err(self.internal(&format!("it has failed before ({text})"))),
            None => Ok(()),
        }
    }

    /// Records that `error` is returned to the caller.
    fn note(&mut self, error: TransportError) -> TransportError {
        self.broken.get_or_insert_with(|| error.to_string());
        error
    }

    fn free_buffer(&mut self) -> Result<usize, TransportError> {
        if self.buffers.is_none() {
            // One more than can be in progress: the one that is being filled.
            let count = self.options.depth + 1;
            self.buffers = Some(Buffers::new(count));
            self.free = (0..count).collect();
        }
        loop {
            if let Some(index) = self.free.pop() {
                return Ok(index);
            }
            if self.is_idle() {
                return Err(self.internal("a buffer was lost"));
            }
            self.reap()?;
        }
    }

    fn send_filling(&mut self) -> Result<(), TransportError> {
        let Some((index, at, length)) = self.filling.take() else { return Ok(()) };
        let Some(buffers) = &self.buffers else { return Err(self.internal("no buffers")) };
        let memory = buffers.address(index);
        self.send(Piece { write: true, at, memory, length, buffer: Some(index) })
    }

    fn internal(&self, what: &str) -> TransportError {
        failed(self.file.path(), "page queue", 0, io::Error::other(what.to_owned()))
    }
}

impl Drop for PageQueue {
    fn drop(&mut self) {
        while !self.is_idle() {
            if self.reap().is_err() {
                // The kernel may still use the memory of some pieces. Leaking it is safer than a second use.
                std::mem::forget(self.buffers.take());
                std::mem::forget(self.ram.take());
                break;
            }
        }
        // The ring must be dropped before the memory that is registered with it.
        self.engine = Engine::Plain;
    }
}

impl std::fmt::Debug for PageQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageQueue").field("file", &self.file.path()).field("options", &self.options).finish()
    }
}
