//! Decompresses streams, with a thread that works ahead of the reader.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use super::lzop;
use crate::format::Compression;
use parking_lot::Mutex;

/// Bytes of the first piece. The calling thread decompresses it, so that a small stream needs no thread.
const FIRST: usize = 64 << 10;
/// Bytes of every further piece; number of pieces that may wait for the reader.
const PIECE: usize = 1 << 20;
const AHEAD: usize = 4;
/// Bytes of the buffer for compressed input.
const COMPRESSED: usize = 128 << 10;
/// Limit of an xz stream's memory in KiB: twice the need of `xz -9`.
const XZ_KIB: u32 = 256 << 10;

/// A codec's message about damaged input, carried through `io::Error`.
#[derive(Debug, thiserror::Error)]
#[error("{compression}: {reason}")]
pub(crate) struct Damaged {
    pub(crate) compression: &'static str,
    pub(crate) reason: String,
    /// Bytes that were decompressed before the error.
    pub(crate) decompressed: u64,
    /// Bytes of the compressed stream that the codec had read when it stopped.
    ///
    /// The damage is before this byte, in the block that ends there or contains it.
    pub(crate) compressed: u64,
}

/// Maps pieces of the decompressed stream to their offsets in the compressed stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(Arc<Mutex<Vec<(u64, u64)>>>);

impl Places {
    /// The range of the compressed stream, relative to its start, that contains byte `decompressed`.
    ///
    /// The range covers about 1 MiB of decompressed data.
    pub(crate) fn compressed(&self, decompressed: u64) -> Option<(u64, u64)> {
        let ends = self.0.lock();
        let index = ends.partition_point(|(end, _)| *end <= decompressed);
        let before = index.checked_sub(1).map_or(0, |before| ends[before].1);
        ends.get(index).map(|(_, compressed)| (before, *compressed))
    }

    fn add(&self, decompressed: u64, compressed: u64) {
        self.0.lock().push((decompressed, compressed));
    }
}

/// Makes a reader that decompresses `from`.
///
/// After the first 64 KiB, a separate thread decompresses ahead of the reader. It ends when the reader is dropped.
///
/// # Errors
/// This function fails if the codec has no memory. The reader reports damaged data as an error with the format and
/// the reason. It also reports a thread that cannot be started.
pub fn decompress(
    compression: Compression,
    from: impl Read + Send + 'static,
) -> io::Result<Box<dyn Read + Send>> {
    decompress_with(compression, from, &Places::default())
}

/// Like [`decompress`], and records in `places` the compressed offset of every piece.
pub(crate) fn decompress_with<R: Read + Send + 'static>(
    compression: Compression,
    from: R,
    places: &Places,
) -> io::Result<Box<dyn Read + Send>> {
    let decoder: Decoder<R> = match compression {
        Compression::None => return Ok(Box::new(BufReader::with_capacity(PIECE, from))),
        Compression::Gzip => gzip,
        Compression::Bzip2 => |from| Ok(Box::new(bzip2::bufread::MultiBzDecoder::new(from))),
        Compression::Xz => |from| Ok(Box::new(lzma_rust2::XzReader::new_mem_limit(from, true, XZ_KIB))),
        Compression::Lzop => |from| Ok(Box::new(lzop::Reader::new(from))),
        Compression::Zstd => |from| Ok(Box::new(zstd::stream::read::Decoder::with_buffer(from)?)),
    };
    Ok(Box::new(reader(compression, decoder, from, places)?))
}

/// Makes a codec that reads compressed bytes.
type Decoder<R> = fn(Taken<R>) -> io::Result<Box<dyn Read + Send>>;

fn gzip<R: Read + Send + 'static>(from: Taken<R>) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(flate2::bufread::MultiGzDecoder::new(from)))
}

fn reader<R: Read>(
    compression: Compression,
    decoder: Decoder<R>,
    from: R,
    places: &Places,
) -> io::Result<Ahead> {
    let taken = Arc::new(AtomicU64::new(0));
    let from = Taken { from: BufReader::with_capacity(COMPRESSED, from), taken: Arc::clone(&taken) };
    let codec =
        Codec { compression, decoder: decoder(from)?, taken, decompressed: 0, places: places.clone() };
    Ok(Ahead { next: Next::Here(codec), piece: Vec::new(), at: 0 })
}

/// Counts the compressed bytes that the codec reads.
struct Taken<R> {
    from: BufReader<R>,
    taken: Arc<AtomicU64>,
}

impl<R: Read> Read for Taken<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(to)?;
        self.taken.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

impl<R: Read> BufRead for Taken<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.from.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.from.consume(count);
        self.taken.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// A codec and its progress.
struct Codec {
    compression: Compression,
    decoder: Box<dyn Read + Send>,
    /// Compressed bytes that the codec has read.
    taken: Arc<AtomicU64>,
    decompressed: u64,
    places: Places,
}

impl Codec {
    /// Returns a piece of at most `length` bytes; also the result if the stream ended.
    fn piece(&mut self, length: usize) -> (Vec<u8>, Option<io::Result<()>>) {
        let (piece, end) = fill(&mut *self.decoder, length);
        self.decompressed += piece.len() as u64;
        let compressed = self.taken.load(Ordering::Relaxed);
        self.places.add(self.decompressed, compressed);
        let end =
            end.map(|end| end.map_err(|error| judge(self.compression, error, self.decompressed, compressed)));
        (piece, end)
    }
}

/// Pieces from the thread that works ahead; an empty piece marks the end.
type Pieces = Receiver<io::Result<Vec<u8>>>;

fn ahead(mut codec: Codec) -> io::Result<Pieces> {
    let (sender, pieces) = sync_channel(AHEAD);
    std::thread::Builder::new().name(format!("un{}", codec.compression.name())).spawn(move || {
        loop {
            let (piece, end) = codec.piece(PIECE);
            if !piece.is_empty() && sender.send(Ok(piece)).is_err() {
                return;
            }
            let Some(end) = end else { continue };
            // The send fails if the reader was dropped. Then the result is not needed.
            let _ = sender.send(end.map(|()| Vec::new()));
            return;
        }
    })?;
    Ok(pieces)
}

/// Reads a piece of at most `length` bytes. Also returns the result if the stream ended after it.
fn fill(from: &mut dyn Read, length: usize) -> (Vec<u8>, Option<io::Result<()>>) {
    let mut piece = vec![0; length];
    let mut done = 0;
    let end = loop {
        if done == piece.len() {
            break None;
        }
        match from.read(&mut piece[done..]) {
            Ok(0) => break Some(Ok(())),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Some(Err(error)),
        }
    };
    piece.truncate(done);
    (piece, end)
}

/// Passes errors of the system unchanged, and converts errors of the codec to [`Damaged`].
fn judge(compression: Compression, error: io::Error, decompressed: u64, compressed: u64) -> io::Error {
    if error.raw_os_error().is_some() {
        return error;
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the compressed data ends too early".to_owned(),
        _ => error.to_string(),
    };
    io::Error::other(Damaged { compression: compression.name(), reason, decompressed, compressed })
}

/// The reader: takes pieces and copies them to its caller.
struct Ahead {
    next: Next,
    piece: Vec<u8>,
    at: usize,
}

/// The source of the next piece.
enum Next {
    /// The codec itself, for the first piece.
    Here(Codec),
    /// The thread that works ahead.
    There(Pieces),
    /// The stream has ended; no piece follows.
    Over,
    /// An error, which the next read reports; no piece follows.
    Failed(io::Error),
}

impl Ahead {
    /// The next piece, empty at the end.
    fn next(&mut self) -> io::Result<Vec<u8>> {
        match std::mem::replace(&mut self.next, Next::Over) {
            Next::Here(mut codec) => {
                let (piece, end) = codec.piece(FIRST);
                self.next = match end {
                    None => match ahead(codec) {
                        Ok(pieces) => Next::There(pieces),
                        Err(error) => Next::Failed(error),
                    },
                    Some(Ok(())) => Next::Over,
                    Some(Err(error)) => Next::Failed(error),
                };
                if piece.is_empty() { self.next() } else { Ok(piece) }
            }
            Next::There(pieces) => {
                let dead = |_| io::Error::other("the decompressing thread has panicked");
                let piece = pieces.recv().map_err(dead)??;
                if !piece.is_empty() {
                    self.next = Next::There(pieces);
                }
                Ok(piece)
            }
            Next::Over => Ok(Vec::new()),
            Next::Failed(error) => Err(error),
        }
    }
}

impl Read for Ahead {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            self.at = 0;
            self.piece.clear();
            self.piece = self.next()?;
        }
        let count = to.len().min(self.piece.len() - self.at);
        to[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compressed(length: usize) -> Vec<u8> {
        let plain: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
        let mut out = Vec::new();
        flate2::read::GzEncoder::new(&plain[..], flate2::Compression::fast()).read_to_end(&mut out).unwrap();
        out
    }

    #[test]
    fn decompress_of_what_fits_the_first_piece_starts_no_thread() {
        for length in [0, 1, FIRST - 1] {
            let mut reader =
                reader(Compression::Gzip, gzip, io::Cursor::new(compressed(length)), &Places::default())
                    .unwrap();
            let mut byte = [0];

            let first = reader.read(&mut byte).unwrap();

            assert!(first == length.min(1) && matches!(reader.next, Next::Over), "{length}");
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            assert_eq!(first + rest.len(), length);
        }
    }

    #[test]
    fn decompress_of_more_than_the_first_piece_goes_on_in_a_thread_and_ends_where_it_must() {
        for length in [FIRST, FIRST + 1, FIRST + PIECE, FIRST + PIECE + 1, FIRST + 7 * PIECE] {
            let mut reader =
                reader(Compression::Gzip, gzip, io::Cursor::new(compressed(length)), &Places::default())
                    .unwrap();
            let mut out = vec![0];

            reader.read_exact(&mut out).unwrap();

            assert!(matches!(reader.next, Next::There(_)), "{length}");
            reader.read_to_end(&mut out).unwrap();
            assert!(out.len() == length && out.iter().enumerate().all(|(at, byte)| *byte == (at / 7) as u8));
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn decompress_of_a_cut_stream_gives_what_came_before_the_error() {
        for length in [FIRST / 2, FIRST + PIECE / 2] {
            let mut cut = compressed(length);
            cut.truncate(cut.len() - 1);
            let mut out = Vec::new();

            let error = reader(Compression::Gzip, gzip, io::Cursor::new(cut), &Places::default())
                .unwrap()
                .read_to_end(&mut out);

            assert!(error.unwrap_err().to_string().contains("ends too early"));
            assert_eq!(out.len(), length);
        }
    }
}
