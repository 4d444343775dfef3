//! Compresses a piece into zstd frames, each at one of two levels.
//!
//! Bytes that compress get the usual level, other bytes the fastest level.
//!
//! Encrypted or compressed files in a guest's memory do not become smaller. The usual level takes twice as long for
//! them as the fastest level. Therefore a sample of each stretch is compressed first. The sample misses one case: a
//! page that occurs twice and does not compress by itself.

use std::io::{self, Cursor};

use zstd::bulk::Compressor;

/// The level of the program that libvirt runs.
const LEVEL: i32 = 3;
/// The fastest level of zstd.
const FASTEST: i32 = -131_072;
/// The level for samples. It detects nearly all data that the usual level can compress.
const SAMPLE_LEVEL: i32 = 1;

/// The least number of bytes that are compressed at one level.
const STRETCH_BYTES: usize = 512 << 10;
/// Bytes of every page that the sample contains.
const SAMPLED_BYTES: usize = 256;
const PAGE_BYTES: usize = 4 << 10;
/// Upper estimate of the bytes that a frame adds to its content.
const FRAME_BYTES: usize = 128;
/// A stretch is compressible if its sample shrinks by at least one part in 50.
const WORTH_ONE_IN: usize = 50;

/// Compresses pieces in one thread.
pub(super) struct ZstdFrames {
    usual: Compressor<'static>,
    fastest: Compressor<'static>,
    sampler: Compressor<'static>,
    sample: Vec<u8>,
    sample_compressed: Vec<u8>,
}

impl ZstdFrames {
    pub(crate) fn new() -> io::Result<Self> {
        let at = |level| {
            let mut compressor = Compressor::new(level)?;
            compressor.include_checksum(true)?;
            io::Result::Ok(compressor)
        };
        Ok(Self {
            usual: at(LEVEL)?,
            fastest: at(FASTEST)?,
            sampler: Compressor::new(SAMPLE_LEVEL)?,
            sample: Vec::new(),
            sample_compressed: Vec::new(),
        })
    }

    /// Appends `piece`'s frames to `out`. An empty piece gives an empty frame.
    pub(crate) fn compress(&mut self, piece: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        out.reserve(
            zstd::zstd_safe::compress_bound(piece.len()) + FRAME_BYTES * piece.len().div_ceil(STRETCH_BYTES),
        );
        let mut begin = 0;
        let mut compresses = self.compresses(&piece[..piece.len().min(STRETCH_BYTES)])?;
        for at in (STRETCH_BYTES..piece.len()).step_by(STRETCH_BYTES) {
            let next = self.compresses(&piece[at..piece.len().min(at + STRETCH_BYTES)])?;
            if next != compresses {
                self.frame(compresses, &piece[begin..at], out)?;
                (begin, compresses) = (at, next);
            }
        }
        self.frame(compresses, &piece[begin..], out)
    }

    /// Whether a sample of `stretch` shrinks.
    fn compresses(&mut self, stretch: &[u8]) -> io::Result<bool> {
        self.sample.clear();
        for (index, page) in stretch.chunks(PAGE_BYTES).enumerate() {
            // The position changes from page to page. Otherwise a common header of all pages would hide their other
            // content.
            let place = index * 7 % (PAGE_BYTES / SAMPLED_BYTES);
            self.sample.extend_from_slice(page.chunks(SAMPLED_BYTES).cycle().nth(place).unwrap_or_default());
        }
        self.sample_compressed.clear();
        self.sample_compressed.reserve(zstd::zstd_safe::compress_bound(self.sample.len()));
        let compressed = self.sampler.compress_to_buffer(&self.sample, &mut self.sample_compressed)?;
        Ok(compressed < self.sample.len() - self.sample.len() / WORTH_ONE_IN)
    }

    fn frame(&mut self, compresses: bool, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let compressor = if compresses { &mut self.usual } else { &mut self.fastest };
        out.reserve(zstd::zstd_safe::compress_bound(bytes.len()));
        let mut behind = Cursor::new(&mut *out);
        behind.set_position(behind.get_ref().len() as u64);
        compressor.compress_to_buffer(bytes, &mut behind).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(bytes: usize, seed: u64) -> Vec<u8> {
        let mut noise = vec![0; bytes];
        fastrand::Rng::with_seed(seed).fill(&mut noise);
        noise
    }

    fn text(bytes: usize) -> Vec<u8> {
        b"a page of memory that repeats itself, ".iter().copied().cycle().take(bytes).collect()
    }

    fn compressed(piece: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        ZstdFrames::new().unwrap().compress(piece, &mut out).unwrap();
        assert!(zstd::decode_all(&out[..]).unwrap() == piece);
        out
    }

    #[test]
    fn compress_of_what_shrinks_is_what_the_usual_level_makes_of_it() {
        let mixed: Vec<u8> =
            (0..64).flat_map(|n| if n % 2 == 0 { noise(4096, n + 1) } else { text(4096) }).collect();
        for piece in [text(4 << 20), vec![0; 4 << 20], mixed, text(100), Vec::new()] {
            let mut usual = Compressor::new(LEVEL).unwrap();
            usual.include_checksum(true).unwrap();
            assert!(compressed(&piece) == usual.compress(&piece).unwrap(), "{} bytes", piece.len());
        }
    }

    #[test]
    fn compress_of_noise_with_few_pages_of_text_shrinks_by_all_of_them() {
        let is_text = |page: u64| page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0;
        let pages: Vec<u8> =
            (0..1024).flat_map(|n| if is_text(n) { text(4096) } else { noise(4096, n + 1) }).collect();
        let noise_bytes = 4096 * (0..1024).filter(|n| !is_text(*n)).count();
        assert!(noise_bytes < 980 << 12, "some pages are text");

        let length = compressed(&pages).len();

        assert!(length < noise_bytes + 16_384, "{length} bytes of {noise_bytes}");
    }

    #[test]
    fn stretches_of_noise_cost_nothing_of_what_lies_between_them() {
        let piece = [text(1 << 20), noise(1 << 20, 7), text(1 << 20), noise(1000, 9)].concat();

        let length = compressed(&piece).len();

        let noise_bytes = (1 << 20) + 1000;
        assert!(length > noise_bytes && length < noise_bytes + 2048, "{length} bytes");
    }
}
