//! Packed streams as they were before.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::lzop;
use crate::model::Packing;

/// Bytes unpacked at once, and how many such pieces may lie ahead of the reader.
const PIECE: usize = 1 << 20;
const AHEAD: usize = 4;
/// Memory that an xz stream may ask for, in KiB: that of `xz -9`, and as much again.
const XZ_KIB: u32 = 256 << 10;

/// A codec's word on damaged input, carried through `io::Error`.
#[derive(Debug, thiserror::Error)]
#[error("{packing}: {reason}")]
pub(crate) struct Damaged {
    pub(crate) packing: &'static str,
    pub(crate) reason: String,
    /// Bytes that were unpacked before.
    pub(crate) unpacked: u64,
    /// Bytes of the packed stream that the codec had taken when it stopped: the damage is before, in the block that ends
    /// there or holds that byte.
    pub(crate) packed: u64,
}

/// Where pieces of a stream stand in its packed form.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(Arc<Mutex<Vec<(u64, u64)>>>);

impl Places {
    /// The stretch of the packed stream, from its start, that byte `unpacked` came out of: about a megabyte's.
    pub(crate) fn packed(&self, unpacked: u64) -> Option<(u64, u64)> {
        let ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = ends.partition_point(|(end, _)| *end <= unpacked);
        let before = index.checked_sub(1).map_or(0, |before| ends[before].1);
        ends.get(index).map(|(_, packed)| (before, *packed))
    }

    fn add(&self, unpacked: u64, packed: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((unpacked, packed));
    }
}

/// A reader of what `from` was before it was packed. It works ahead in a thread of its own, which ends when the
/// reader is dropped.
///
/// # Errors
/// If the thread cannot be started. What is damaged is told by the reader, as an error that says which format and why.
pub fn unpack(packing: Packing, from: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    unpack_with(packing, from, &Places::default())
}

/// As [`unpack`], and writes down where what came out stood.
pub(crate) fn unpack_with(
    packing: Packing,
    from: impl Read + Send + 'static,
    places: &Places,
) -> io::Result<Box<dyn Read + Send>> {
    let taken = Arc::new(AtomicU64::new(0));
    let from = Taken { from: BufReader::with_capacity(PIECE, from), taken: Arc::clone(&taken) };
    let decoder: Box<dyn Read + Send> = match packing {
        Packing::None => return Ok(Box::new(from)),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
        Packing::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(from)),
        Packing::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(from, true, XZ_KIB)),
        Packing::Lzop => Box::new(lzop::Reader::new(from)),
        Packing::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(from)?),
    };
    ahead(packing, decoder, taken, places.clone())
}

/// Counts the bytes that a codec takes.
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

fn ahead(
    packing: Packing,
    mut decoder: Box<dyn Read + Send>,
    taken: Arc<AtomicU64>,
    places: Places,
) -> io::Result<Box<dyn Read + Send>> {
    let (sender, pieces) = sync_channel(AHEAD);
    std::thread::Builder::new().name(format!("un{}", packing.name())).spawn(move || {
        let mut unpacked = 0;
        loop {
            let (piece, end) = fill(&mut *decoder);
            unpacked += piece.len() as u64;
            let packed = taken.load(Ordering::Relaxed);
            places.add(unpacked, packed);
            if !piece.is_empty() && sender.send(Ok(piece)).is_err() {
                return;
            }
            let Some(end) = end else { continue };
            // An empty piece is the end. Nobody may be there to hear it.
            let _ = sender
                .send(end.map(|()| Vec::new()).map_err(|error| judge(packing, error, unpacked, packed)));
            return;
        }
    })?;
    Ok(Box::new(Ahead { pieces, piece: Vec::new(), at: 0, is_over: false }))
}

/// Reads a piece; whether and how the stream ended behind it.
fn fill(from: &mut dyn Read) -> (Vec<u8>, Option<io::Result<()>>) {
    let mut piece = vec![0; PIECE];
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

/// Whether the system or the codec complains.
fn judge(packing: Packing, error: io::Error, unpacked: u64, packed: u64) -> io::Error {
    if error.raw_os_error().is_some() {
        return error;
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the packed data end too early".to_owned(),
        _ => error.to_string(),
    };
    io::Error::other(Damaged { packing: packing.name(), reason, unpacked, packed })
}

/// The reader's end.
struct Ahead {
    pieces: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    is_over: bool,
}

impl Read for Ahead {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() && !self.is_over {
            self.at = 0;
            self.piece.clear();
            match self.pieces.recv() {
                Ok(Ok(piece)) => self.piece = piece,
                Ok(Err(error)) => {
                    self.is_over = true;
                    return Err(error);
                }
                Err(_) => return Err(io::Error::other("the thread that unpacks has died")),
            }
            self.is_over = self.piece.is_empty();
        }
        let count = to.len().min(self.piece.len() - self.at);
        to[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
