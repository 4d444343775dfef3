//! Compresses a stream in independent pieces, by several threads in parallel, in the stream's order.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::lzop;
use super::zstd_frames::ZstdFrames;
use crate::format::Compression;
use parking_lot::Mutex;

/// Buffers of one piece. They travel to a thread and return, to be reused.
///
/// The allocation of new memory would take more time than some of the codecs.
#[derive(Default)]
struct Piece {
    plain: Vec<u8>,
    compressed: Vec<u8>,
}

/// A piece to compress, and the channel that receives the result.
struct Job {
    piece: Piece,
    result: SyncSender<io::Result<Piece>>,
}

/// Compresses the bytes that are written to it, and writes the result to `W`.
///
/// The result is complete only after [`finish`](Self::finish).
///
/// Threads start with the first full piece. A stream smaller than one piece is compressed by the calling thread.
///
/// Memory: a few pieces of some MiB for each thread ([`Compression`] decides the size).
pub struct Compressor<W> {
    out: W,
    compression: Compression,
    /// The piece that is being filled.
    piece: Piece,
    piece_bytes: usize,
    threads: usize,
    /// Sends jobs to the threads; none until the first piece is full.
    jobs: Option<SyncSender<Job>>,
    /// Results in the order of the stream.
    results: VecDeque<Receiver<io::Result<Piece>>>,
    most_results: usize,
    /// Buffers of pieces that are already written, for reuse.
    spare: Vec<Piece>,
    has_begun: bool,
}

impl<W: Write> Compressor<W> {
    /// Makes a compressor with `threads` threads (at least one).
    pub fn new(out: W, compression: Compression, threads: usize) -> Self {
        let threads = threads.max(1);
        Self {
            out,
            compression,
            piece: Piece::default(),
            piece_bytes: piece_bytes(compression),
            threads,
            jobs: None,
            results: VecDeque::new(),
            most_results: threads + 2,
            spare: Vec::new(),
            has_begun: false,
        }
    }

    /// The channel to the threads. Starts the threads if they do not run yet.
    fn jobs(&mut self) -> io::Result<&SyncSender<Job>> {
        let jobs = match self.jobs.take() {
            Some(jobs) => jobs,
            None => start(self.compression, self.threads)?,
        };
        Ok(self.jobs.insert(jobs))
    }

    /// Compresses the remaining bytes and returns the inner writer, which is not flushed.
    ///
    /// # Errors
    /// The errors of [`Write::write`].
    pub fn finish(mut self) -> io::Result<W> {
        if self.compression == Compression::None {
            return Ok(self.out);
        }
        // An empty stream becomes a valid compressed file with no content.
        if !self.has_begun {
            self.begin()?;
            Worker::default().compress(self.compression, &mut self.piece)?;
            self.out.write_all(&self.piece.compressed)?;
        } else if !self.piece.plain.is_empty() {
            self.send_piece()?;
        }
        while let Some(result) = self.results.pop_front() {
            self.write_result(&result)?;
        }
        if self.compression == Compression::Lzop {
            self.out.write_all(&lzop::END)?;
        }
        Ok(self.out)
    }

    /// Writes the file header before the first piece (only lzop has one).
    fn begin(&mut self) -> io::Result<()> {
        if !self.has_begun && self.compression == Compression::Lzop {
            self.out.write_all(&lzop::header())?;
        }
        self.has_begun = true;
        Ok(())
    }

    fn send_piece(&mut self) -> io::Result<()> {
        self.begin()?;
        if self.results.len() == self.most_results
            && let Some(result) = self.results.pop_front()
        {
            self.write_result(&result)?;
        }
        let piece = std::mem::replace(&mut self.piece, self.spare.pop().unwrap_or_default());
        let (sender, result) = sync_channel(1);
        self.jobs()?
            .send(Job { piece, result: sender })
            .map_err(|_| io::Error::other("the compressing threads have panicked"))?;
        self.results.push_back(result);
        Ok(())
    }

    fn write_result(&mut self, result: &Receiver<io::Result<Piece>>) -> io::Result<()> {
        let mut piece =
            result.recv().map_err(|_| io::Error::other("a compressing thread has panicked"))??;
        self.out.write_all(&piece.compressed)?;
        piece.plain.clear();
        piece.compressed.clear();
        self.spare.push(piece);
        Ok(())
    }
}

/// Starts the compressing threads. They end when the sender that this function returns is dropped.
fn start(compression: Compression, threads: usize) -> io::Result<SyncSender<Job>> {
    let (sender, receiver) = sync_channel::<Job>(threads);
    let receiver = Arc::new(Mutex::new(receiver));
    for _ in 0..threads {
        let receiver = Arc::clone(&receiver);
        let mut worker = Worker::default();
        std::thread::Builder::new().name(compression.name().to_owned()).spawn(move || {
            loop {
                // Only the wait for a job is under the lock.
                let job = receiver.lock().recv();
                let Ok(Job { mut piece, result }) = job else { return };
                let done = worker.compress(compression, &mut piece);
                // The send fails if the compressor was dropped. Then the result is not needed.
                let _ = result.send(done.map(|()| piece));
            }
        })?;
    }
    Ok(sender)
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.compression == Compression::None {
            return self.out.write(bytes);
        }
        self.piece.plain.reserve_exact(self.piece_bytes - self.piece.plain.len());
        let count = bytes.len().min(self.piece_bytes - self.piece.plain.len());
        self.piece.plain.extend_from_slice(&bytes[..count]);
        if self.piece.plain.len() == self.piece_bytes {
            self.send_piece()?;
        }
        Ok(count)
    }

    /// Does nothing: a piece is compressed only when it is full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes that are compressed in one piece. Larger pieces compress better and take more memory.
fn piece_bytes(compression: Compression) -> usize {
    match compression {
        Compression::None => 0,
        Compression::Gzip => 1 << 20,
        // A whole number of bzip2's own blocks.
        Compression::Bzip2 => 2 * 900_000,
        // Twice the dictionary of preset 3.
        Compression::Xz => 8 << 20,
        Compression::Lzop => 8 * lzop::BLOCK_BYTES,
        // Twice the window of level 3.
        Compression::Zstd => 4 << 20,
    }
}

/// Bytes that each level of bzip2 adds to its block.
const BZIP2_STEP: usize = 100_000;
/// The smallest dictionary of xz, in bytes.
const XZ_LEAST: u32 = 4 << 10;

/// The codec state of one thread.
#[derive(Default)]
struct Worker {
    /// None before the first piece.
    zstd: Option<ZstdFrames>,
}

impl Worker {
    /// Compresses a piece into a complete file (lzop: into blocks).
    ///
    /// The level is the same as in the program that libvirt runs.
    fn compress(
        &mut self,
        compression: Compression,
        Piece { plain, compressed }: &mut Piece,
    ) -> io::Result<()> {
        match compression {
            Compression::None => compressed.extend_from_slice(plain),
            Compression::Gzip => {
                let level = flate2::Compression::new(6);
                flate2::bufread::GzEncoder::new(&plain[..], level).read_to_end(compressed)?;
            }
            Compression::Bzip2 => {
                // The level sets the block length, and no block needs to be longer than the piece.
                let level = bzip2::Compression::new(plain.len().div_ceil(BZIP2_STEP).clamp(1, 9) as u32);
                bzip2::bufread::BzEncoder::new(&plain[..], level).read_to_end(compressed)?;
            }
            Compression::Xz => {
                let mut options = lzma_rust2::XzOptions::with_preset(3);
                // No match can start before the piece. A smaller dictionary makes all tables of the encoder smaller.
                let most = options.lzma_options.dict_size;
                options.lzma_options.dict_size =
                    (plain.len() as u32).next_power_of_two().clamp(XZ_LEAST, most);
                options.set_block_size(NonZeroU64::new(piece_bytes(Compression::Xz) as u64));
                let mut writer = lzma_rust2::XzWriter::new(compressed, options)?;
                writer.write_all(plain)?;
                writer.finish()?;
            }
            Compression::Lzop => lzop::blocks(plain, compressed),
            Compression::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(ZstdFrames::new()?),
                };
                zstd.compress(plain, compressed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::super::decompress;
    use super::*;

    #[test]
    fn decompress_what_the_compressor_wrote_gives_it_back() {
        // More than three pieces in every format except xz.
        let long: Vec<u8> = (0..3_500_000u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        for compression in iter::once(Compression::None).chain(Compression::all()) {
            for from in [&long[..], &long[..1], b""] {
                let mut compressor = Compressor::new(Vec::new(), compression, 2);
                compressor.write_all(from).unwrap();
                let compressed = compressor.finish().unwrap();

                let mut out = Vec::new();
                decompress(compression, io::Cursor::new(compressed)).unwrap().read_to_end(&mut out).unwrap();

                assert!(out == from, "{compression:?}, {} bytes", from.len());
            }
        }
    }

    #[test]
    fn packer_of_less_than_a_piece_starts_no_thread_and_of_more_does() {
        for compression in Compression::all() {
            let piece = piece_bytes(compression);
            let mut compressor = Compressor::new(Vec::new(), compression, 2);
            compressor.write_all(&vec![7; piece - 1]).unwrap();
            assert!(compressor.jobs.is_none(), "{compression:?}");

            compressor.write_all(&[7]).unwrap();

            assert!(compressor.jobs.is_some(), "{compression:?}");
            let compressed = compressor.finish().unwrap();
            let mut out = Vec::new();
            decompress(compression, io::Cursor::new(compressed)).unwrap().read_to_end(&mut out).unwrap();
            assert!(out == vec![7; piece], "{compression:?}");
        }
    }

    #[test]
    fn compressed_little_needs_little_memory_to_be_decompressed() {
        let compressed = |compression, from: &[u8]| {
            let mut compressor = Compressor::new(Vec::new(), compression, 1);
            compressor.write_all(from).unwrap();
            compressor.finish().unwrap()
        };
        for length in [0, 1, 5000, 100_000] {
            let from: Vec<u8> = (0..length).map(|at| (at / 3) as u8).collect();
            let mut out = Vec::new();
            let xz = compressed(Compression::Xz, &from);

            lzma_rust2::XzReader::new_mem_limit(&xz[..], true, 1 << 10).read_to_end(&mut out).unwrap();

            assert!(out == from, "{length}");
            assert_eq!(&compressed(Compression::Bzip2, &from)[..4], b"BZh1", "{length}");
        }
        assert_eq!(&compressed(Compression::Bzip2, &vec![1; 850_000])[..4], b"BZh9");
    }

    #[test]
    fn decompress_compressed_stream_cut_anywhere_is_told() {
        let from: Vec<u8> = (0..300_000u32).flat_map(|n| (n / 5).to_le_bytes()).collect();
        for compression in Compression::all() {
            let mut compressor = Compressor::new(Vec::new(), compression, 1);
            compressor.write_all(&from).unwrap();
            let compressed = compressor.finish().unwrap();
            for length in [1, 3, compressed.len() / 2, compressed.len() - 9, compressed.len() - 1] {
                let cut = io::Cursor::new(compressed[..length].to_vec());
                let mut out = Vec::new();

                let read = decompress(compression, cut).unwrap().read_to_end(&mut out);

                assert!(read.is_err(), "{compression:?} cut to {length} of {}", compressed.len());
            }
        }
    }
}
