//! Packed streams as they were before.

use std::io::{self, BufReader, Read};
use std::sync::mpsc::{Receiver, sync_channel};

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
}

/// A reader of what `from` was before it was packed. It works ahead in a thread of its own, which ends when the
/// reader is dropped.
///
/// # Errors
/// If the thread cannot be started. What is damaged is told by the reader, as an error that says which format and why.
pub fn unpack(packing: Packing, from: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let from = BufReader::with_capacity(PIECE, from);
    let decoder: Box<dyn Read + Send> = match packing {
        Packing::None => return Ok(Box::new(from)),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
        Packing::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(from)),
        Packing::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(from, true, XZ_KIB)),
        Packing::Lzop => Box::new(lzop::Reader::new(from)),
        Packing::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(from)?),
    };
    ahead(packing, decoder)
}

fn ahead(packing: Packing, mut decoder: Box<dyn Read + Send>) -> io::Result<Box<dyn Read + Send>> {
    let (sender, pieces) = sync_channel(AHEAD);
    std::thread::Builder::new().name(format!("un{}", packing.name())).spawn(move || {
        loop {
            let (piece, end) = fill(&mut *decoder);
            if !piece.is_empty() && sender.send(Ok(piece)).is_err() {
                return;
            }
            let Some(end) = end else { continue };
            // An empty piece is the end. Nobody may be there to hear it.
            let _ = sender.send(end.map(|()| Vec::new()).map_err(|error| judge(packing, error)));
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
fn judge(packing: Packing, error: io::Error) -> io::Error {
    if error.raw_os_error().is_some() {
        return error;
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the packed data end too early".to_owned(),
        _ => error.to_string(),
    };
    io::Error::other(Damaged { packing: packing.name(), reason })
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
