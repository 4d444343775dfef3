//! Packing a stream in pieces, several at once, in order.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::lzop;
use super::zstd_frames::ZstdFrames;
use crate::model::Packing;
use parking_lot::Mutex;

/// What goes to a thread and comes back, to be used again: memory that is new costs more than some of the packing.
#[derive(Default)]
struct Piece {
    plain: Vec<u8>,
    packed: Vec<u8>,
}

/// A piece to pack, and where the result goes.
struct Job {
    piece: Piece,
    result: SyncSender<io::Result<Piece>>,
}

/// Packs what is written to it and writes that to `W`. Nothing is whole before [`finish`](Self::finish).
///
/// Threads start with the first piece that is full; what is smaller is packed where it is finished.
///
/// Memory: for each thread some pieces of a few MiB ([`Packing`] decides).
pub struct Packer<W> {
    out: W,
    packing: Packing,
    /// The one that is being filled.
    piece: Piece,
    piece_bytes: usize,
    threads: usize,
    /// The way to the threads, once there are any.
    jobs: Option<SyncSender<Job>>,
    /// Results in the order of the stream.
    results: VecDeque<Receiver<io::Result<Piece>>>,
    most_results: usize,
    /// Written, and free for what comes next.
    spare: Vec<Piece>,
    has_begun: bool,
}

impl<W: Write> Packer<W> {
    /// A packer with so many threads (at least one).
    pub fn new(out: W, packing: Packing, threads: usize) -> Self {
        let threads = threads.max(1);
        Self {
            out,
            packing,
            piece: Piece::default(),
            piece_bytes: piece_bytes(packing),
            threads,
            jobs: None,
            results: VecDeque::new(),
            most_results: threads + 2,
            spare: Vec::new(),
            has_begun: false,
        }
    }

    /// The way to the threads, which are started if there are none yet.
    fn jobs(&mut self) -> io::Result<&SyncSender<Job>> {
        let jobs = match self.jobs.take() {
            Some(jobs) => jobs,
            None => start(self.packing, self.threads)?,
        };
        Ok(self.jobs.insert(jobs))
    }

    /// Packs the rest and gives back what is below; nothing is flushed there.
    ///
    /// # Errors
    /// As of [`Write::write`].
    pub fn finish(mut self) -> io::Result<W> {
        if self.packing == Packing::None {
            return Ok(self.out);
        }
        // Nothing at all becomes a file of nothing.
        if !self.has_begun {
            self.begin()?;
            Worker::default().pack(self.packing, &mut self.piece)?;
            self.out.write_all(&self.piece.packed)?;
        } else if !self.piece.plain.is_empty() {
            self.send_piece()?;
        }
        while let Some(result) = self.results.pop_front() {
            self.write_result(&result)?;
        }
        if self.packing == Packing::Lzop {
            self.out.write_all(&lzop::END)?;
        }
        Ok(self.out)
    }

    /// What stands in front of the first piece.
    fn begin(&mut self) -> io::Result<()> {
        if !self.has_begun && self.packing == Packing::Lzop {
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
        self.out.write_all(&piece.packed)?;
        piece.plain.clear();
        piece.packed.clear();
        self.spare.push(piece);
        Ok(())
    }
}

/// Starts threads that pack; they end when the way to them is dropped.
fn start(packing: Packing, threads: usize) -> io::Result<SyncSender<Job>> {
    let (sender, receiver) = sync_channel::<Job>(threads);
    let receiver = Arc::new(Mutex::new(receiver));
    for _ in 0..threads {
        let receiver = Arc::clone(&receiver);
        let mut worker = Worker::default();
        std::thread::Builder::new().name(packing.name().to_owned()).spawn(move || {
            loop {
                // Only the wait for a job is under the lock.
                let job = receiver.lock().recv();
                let Ok(Job { mut piece, result }) = job else { return };
                let done = worker.pack(packing, &mut piece);
                // Nobody waits any more if the packer was dropped.
                let _ = result.send(done.map(|()| piece));
            }
        })?;
    }
    Ok(sender)
}

impl<W: Write> Write for Packer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.packing == Packing::None {
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

    /// Does nothing: a piece is packed when it is full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is packed at once. Larger pieces pack better and take more memory.
fn piece_bytes(packing: Packing) -> usize {
    match packing {
        Packing::None => 0,
        Packing::Gzip => 1 << 20,
        // A whole number of bzip2's own blocks.
        Packing::Bzip2 => 2 * 900_000,
        // Twice the dictionary of preset 3.
        Packing::Xz => 8 << 20,
        Packing::Lzop => 8 * lzop::BLOCK_BYTES,
        // Twice the window of level 3.
        Packing::Zstd => 4 << 20,
    }
}

/// What a level of bzip2 adds to its block.
const BZIP2_STEP: usize = 100_000;
/// The smallest dictionary of xz.
const XZ_LEAST: u32 = 4 << 10;

/// What one thread packs with.
#[derive(Default)]
struct Worker {
    /// None before the first piece.
    zstd: Option<ZstdFrames>,
}

impl Worker {
    /// A piece as a file of its own (lzop: as blocks), at the level of the program that libvirt runs.
    fn pack(&mut self, packing: Packing, Piece { plain, packed }: &mut Piece) -> io::Result<()> {
        match packing {
            Packing::None => packed.extend_from_slice(plain),
            Packing::Gzip => {
                let level = flate2::Compression::new(6);
                flate2::bufread::GzEncoder::new(&plain[..], level).read_to_end(packed)?;
            }
            Packing::Bzip2 => {
                // The level is the length of a block, and no block is longer than the piece.
                let level = bzip2::Compression::new(plain.len().div_ceil(BZIP2_STEP).clamp(1, 9) as u32);
                bzip2::bufread::BzEncoder::new(&plain[..], level).read_to_end(packed)?;
            }
            Packing::Xz => {
                let mut options = lzma_rust2::XzOptions::with_preset(3);
                // No match lies farther back than the piece begins, and all tables are as large as the dictionary.
                let most = options.lzma_options.dict_size;
                options.lzma_options.dict_size =
                    (plain.len() as u32).next_power_of_two().clamp(XZ_LEAST, most);
                options.set_block_size(NonZeroU64::new(piece_bytes(Packing::Xz) as u64));
                let mut writer = lzma_rust2::XzWriter::new(packed, options)?;
                writer.write_all(plain)?;
                writer.finish()?;
            }
            Packing::Lzop => lzop::blocks(plain, packed),
            Packing::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(ZstdFrames::new()?),
                };
                zstd.pack(plain, packed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::unpack;
    use super::*;

    const ALL: [Packing; 6] =
        [Packing::None, Packing::Gzip, Packing::Bzip2, Packing::Xz, Packing::Lzop, Packing::Zstd];

    #[test]
    fn unpack_what_packer_wrote_gives_it_back() {
        // More than three pieces of every format but xz.
        let long: Vec<u8> = (0..3_500_000u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        for packing in ALL {
            for from in [&long[..], &long[..1], b""] {
                let mut packer = Packer::new(Vec::new(), packing, 2);
                packer.write_all(from).unwrap();
                let packed = packer.finish().unwrap();

                let mut out = Vec::new();
                unpack(packing, io::Cursor::new(packed)).unwrap().read_to_end(&mut out).unwrap();

                assert!(out == from, "{packing:?}, {} bytes", from.len());
            }
        }
    }

    #[test]
    fn packer_of_less_than_a_piece_starts_no_thread_and_of_more_does() {
        for packing in &ALL[1..] {
            let piece = piece_bytes(*packing);
            let mut packer = Packer::new(Vec::new(), *packing, 2);
            packer.write_all(&vec![7; piece - 1]).unwrap();
            assert!(packer.jobs.is_none(), "{packing:?}");

            packer.write_all(&[7]).unwrap();

            assert!(packer.jobs.is_some(), "{packing:?}");
            let packed = packer.finish().unwrap();
            let mut out = Vec::new();
            unpack(*packing, io::Cursor::new(packed)).unwrap().read_to_end(&mut out).unwrap();
            assert!(out == vec![7; piece], "{packing:?}");
        }
    }

    #[test]
    fn packed_little_needs_little_memory_to_be_unpacked() {
        let packed = |packing, from: &[u8]| {
            let mut packer = Packer::new(Vec::new(), packing, 1);
            packer.write_all(from).unwrap();
            packer.finish().unwrap()
        };
        for length in [0, 1, 5000, 100_000] {
            let from: Vec<u8> = (0..length).map(|at| (at / 3) as u8).collect();
            let mut out = Vec::new();
            let xz = packed(Packing::Xz, &from);

            lzma_rust2::XzReader::new_mem_limit(&xz[..], true, 1 << 10).read_to_end(&mut out).unwrap();

            assert!(out == from, "{length}");
            assert_eq!(&packed(Packing::Bzip2, &from)[..4], b"BZh1", "{length}");
        }
        assert_eq!(&packed(Packing::Bzip2, &vec![1; 850_000])[..4], b"BZh9");
    }

    #[test]
    fn unpack_packed_stream_cut_anywhere_is_told() {
        let from: Vec<u8> = (0..300_000u32).flat_map(|n| (n / 5).to_le_bytes()).collect();
        for packing in &ALL[1..] {
            let mut packer = Packer::new(Vec::new(), *packing, 1);
            packer.write_all(&from).unwrap();
            let packed = packer.finish().unwrap();
            for length in [1, 3, packed.len() / 2, packed.len() - 9, packed.len() - 1] {
                let cut = io::Cursor::new(packed[..length].to_vec());
                let mut out = Vec::new();

                let read = unpack(*packing, cut).unwrap().read_to_end(&mut out);

                assert!(read.is_err(), "{packing:?} cut to {length} of {}", packed.len());
            }
        }
    }
}
