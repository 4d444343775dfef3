//! Reads ranges of a file in order, ahead of the caller that processes them.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;

use super::alignment::DIRECT_ALIGN;
use super::buffers::{BUFFER_BYTES, Buffers};
use super::page_file::{PageFile, Whole};
use super::queue::QueueOptions;
use super::ring::{Piece, Ring};
use super::system::failed;
use crate::error::TransportError;

/// Maximum gap, in bytes, between two ranges of one piece. A disk reads such a gap faster than it starts a new
/// request.
const GAP_BYTES: u64 = 64 * 1024;

/// Reads ranges of a file in order, several pieces ahead, into its own memory.
pub struct RangeReader {
    file: Arc<PageFile>,
    ring: Option<Ring>,
    buffers: Buffers,
    free: Vec<usize>,
    on_the_way: VecDeque<Ahead>,
}

/// A piece whose read was started.
struct Ahead {
    buffer: usize,
    /// Start of the piece in the file, aligned.
    at: u64,
    length: usize,
    /// The requested ranges in the piece.
    wanted: Vec<Range<u64>>,
    /// Set when the read has ended.
    done: Option<Result<(), TransportError>>,
}

impl RangeReader {
    /// Makes a reader of `file`. `options.depth` is the number of pieces that it reads ahead.
    pub fn new(file: &Arc<PageFile>, options: QueueOptions) -> Self {
        let depth = options.depth.clamp(1, 1024);
        let buffers = Buffers::new(depth);
        let mut ring =
            (options.io_uring && file.is_direct()).then(|| Ring::new(file.fast(), depth).ok()).flatten();
        if let Some(ring) = &mut ring {
            // SAFETY: the buffers are dropped after the ring; see Drop.
            let _ = unsafe { ring.register(std::iter::once((buffers.address(0), depth * BUFFER_BYTES))) };
        }
        let free = (0..depth).collect();
        Self { file: Arc::clone(file), ring, buffers, free, on_the_way: VecDeque::new() }
    }

    /// Passes the bytes of each range to `each(offset, bytes)`, in order. A piece has at most 1 MiB.
    ///
    /// The ranges must be ascending and must not overlap.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`], and any error of `each`, which ends the reading.
    pub fn read<E: From<TransportError>>(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut pieces = pieces(ranges.into_iter());
        let result = loop {
            match self.next_piece(&mut pieces) {
                Ok(None) => break Ok(()),
                Ok(Some(piece)) => {
                    let handed = piece.wanted.iter().try_for_each(|range| {
                        let (from, to) = ((range.start - piece.at) as usize, (range.end - piece.at) as usize);
                        each(range.start, &self.bytes(&piece)[from..to])
                    });
                    self.free.push(piece.buffer);
                    if handed.is_err() {
                        break handed;
                    }
                }
                Err(error) => break Err(error.into()),
            }
        };
        self.settle();
        result
    }

    /// Starts as many reads as there are buffers, and waits for the first.
    fn next_piece(
        &mut self,
        pieces: &mut impl Iterator<Item = Vec<Range<u64>>>,
    ) -> Result<Option<Ahead>, TransportError> {
        while let Some(buffer) = self.free.pop() {
            let Some(wanted) = pieces.next() else {
                self.free.push(buffer);
                break;
            };
            self.ask(buffer, wanted)?;
        }
        if self.free.is_empty() && self.on_the_way.is_empty() {
            let error = io::Error::other("no free buffer, and no read in progress");
            return Err(failed(self.file.path(), "range reader", 0, error));
        }
        let Some(mut first) = self.await_first()? else { return Ok(None) };
        if let Some(Err(error)) = first.done.take() {
            self.free.push(first.buffer);
            return Err(error);
        }
        Ok(Some(first))
    }

    /// Starts the read of one piece.
    fn ask(&mut self, buffer: usize, wanted: Vec<Range<u64>>) -> Result<(), TransportError> {
        let (Some(first), Some(last)) = (wanted.first(), wanted.last()) else { return Ok(()) };
        let at = first.start - first.start % DIRECT_ALIGN;
        let length = (last.end.next_multiple_of(DIRECT_ALIGN) - at) as usize;
        let needed = (last.end - at) as usize;
        let mut ahead = Ahead { buffer, at, length, wanted, done: None };
        let memory = self.buffers.address(buffer);
        match &mut self.ring {
            Some(ring) => {
                let piece = Piece { write: false, at, memory, length, buffer: Some(buffer) };
                // SAFETY: the buffer was free, so no code touches it until the piece is done. `settle`, which Drop
                // also calls, waits for all pieces.
                unsafe { ring.push(piece) }
                    .map_err(|error| failed(self.file.path(), "io_uring_enter", at, error))?;
            }
            None => {
                // SAFETY: a buffer of this reader that is not in use.
                let read = unsafe { self.file.read_cached(at, &[Whole(memory, needed)]) };
                ahead.done = Some(read);
            }
        }
        self.on_the_way.push_back(ahead);
        Ok(())
    }

    /// Waits for the oldest piece.
    fn await_first(&mut self) -> Result<Option<Ahead>, TransportError> {
        while self.on_the_way.front().is_some_and(|first| first.done.is_none()) {
            let Some(ring) = &mut self.ring else { break };
            let (piece, moved) =
                ring.reap().map_err(|error| failed(self.file.path(), "io_uring_enter", 0, error))?;
            let Some(ahead) = self.on_the_way.iter_mut().find(|ahead| Some(ahead.buffer) == piece.buffer)
            else {
                continue;
            };
            let needed = (ahead.wanted.last().map_or(ahead.at, |last| last.end) - ahead.at) as usize;
            ahead.done = Some(match moved {
                Ok(moved) if moved >= needed => Ok(()),
                // Cut short or refused: a plain read repeats it, and returns the reason if it fails.
                // SAFETY: the piece is done, so the kernel no longer uses the buffer.
                _ => unsafe { self.file.read_cached(piece.at, &[Whole(piece.memory, needed)]) },
            });
        }
        Ok(self.on_the_way.pop_front())
    }

    /// The bytes of a completed piece.
    fn bytes(&mut self, piece: &Ahead) -> &[u8] {
        // SAFETY: the piece is done, so the kernel no longer uses the buffer.
        let bytes = unsafe { self.buffers.bytes(piece.buffer) };
        &bytes[..piece.length]
    }

    /// Waits for all reads in progress and discards them. Afterwards all buffers are free, even after a failure.
    fn settle(&mut self) {
        if let Some(ring) = &mut self.ring {
            while !ring.is_idle() {
                if ring.reap().is_err() {
                    // The kernel may still write to the buffers, so they are leaked.
                    let lost = std::mem::replace(&mut self.buffers, Buffers::new(1));
                    std::mem::forget(lost);
                    self.ring = None;
                    break;
                }
            }
        }
        self.on_the_way.clear();
        self.free = (0..self.buffers.count()).collect();
    }
}

impl Drop for RangeReader {
    fn drop(&mut self) {
        self.settle();
        // The ring must be dropped before the memory that is registered with it.
        self.ring = None;
    }
}

impl std::fmt::Debug for RangeReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeReader").field("file", &self.file.path()).finish_non_exhaustive()
    }
}

/// Splits ranges at buffer boundaries and joins neighbours.
fn pieces(ranges: impl Iterator<Item = Range<u64>>) -> impl Iterator<Item = Vec<Range<u64>>> {
    let mut cut = Cut { ranges: ranges.filter(|range| !range.is_empty()).peekable(), rest: None };
    std::iter::from_fn(move || cut.next_piece())
}

struct Cut<I: Iterator<Item = Range<u64>>> {
    ranges: Peekable<I>,
    /// The part of a range that did not fit into the previous piece.
    rest: Option<Range<u64>>,
}

impl<I: Iterator<Item = Range<u64>>> Cut<I> {
    fn next_piece(&mut self) -> Option<Vec<Range<u64>>> {
        let first = self.rest.take().or_else(|| self.ranges.next())?;
        let limit = (first.start - first.start % DIRECT_ALIGN) + BUFFER_BYTES as u64;
        let mut piece = vec![self.fit(first, limit)];
        while self.rest.is_none() {
            let end = piece.last().map_or(0, |last| last.end);
            let near =
                |next: &Range<u64>| next.start >= end && next.start - end <= GAP_BYTES && next.start < limit;
            let Some(next) = self.ranges.next_if(near) else { break };
            piece.push(self.fit(next, limit));
        }
        Some(piece)
    }

    fn fit(&mut self, range: Range<u64>, limit: u64) -> Range<u64> {
        if range.end <= limit {
            return range;
        }
        self.rest = Some(limit..range.end);
        range.start..limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::OpenOptions;

    #[test]
    fn read_with_all_buffers_lost_is_an_error_and_the_next_read_has_them_again() {
        let mut content = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut content, &[7; 10_000]).unwrap();
        let file = Arc::new(PageFile::open(content.path(), OpenOptions::default()).unwrap());
        let mut reader = RangeReader::new(&file, QueueOptions::default());
        // The state after a piece whose read could not be started.
        reader.free.clear();
        let mut came = 0;
        let mut read = |reader: &mut RangeReader| {
            reader.read(std::iter::once(0..10_000), |_, bytes| -> Result<(), TransportError> {
                came += bytes.len();
                Ok(())
            })
        };

        let lost = read(&mut reader);
        read(&mut reader).unwrap();

        assert!(matches!(lost, Err(TransportError::System { .. })), "{lost:?}");
        assert_eq!(came, 10_000);
    }
}
