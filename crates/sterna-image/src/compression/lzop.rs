//! lzop's file format: a header, blocks with checksums, and a zero word at the end.

use std::io::{self, Read};

use super::lzo;

const MAGIC: &[u8; 9] = b"\x89LZO\0\r\n\x1a\n";
/// Versions in the header.
///
/// These are the versions of the program and the library, and the least version that can decompress the file.
const VERSIONS: [u16; 3] = [0x1040, 0x20a0, 0x0940];
/// LZO1X-1 at lzop's default level.
const METHOD: [u8; 2] = [1, 5];
/// Unix, from stdin, to stdout, with an Adler-32 checksum of the decompressed data.
const FLAGS: u32 = 0x0300_0000 | flag::STDIN | flag::STDOUT | flag::ADLER32_DATA;
/// Decompressed bytes of a block that this encoder writes.
pub(super) const BLOCK_BYTES: usize = 256 << 10;
/// The largest block, in decompressed bytes, that lzop itself accepts.
const MOST_BLOCK_BYTES: usize = 64 << 20;

mod flag {
    pub(super) const ADLER32_DATA: u32 = 1;
    pub(super) const ADLER32_PACKED: u32 = 2;
    pub(super) const STDIN: u32 = 4;
    pub(super) const STDOUT: u32 = 8;
    pub(super) const EXTRA_FIELD: u32 = 0x40;
    pub(super) const CRC32_DATA: u32 = 0x100;
    pub(super) const CRC32_PACKED: u32 = 0x200;
    pub(super) const MULTIPART: u32 = 0x400;
    pub(super) const FILTER: u32 = 0x800;
    pub(super) const HEADER_CRC32: u32 = 0x1000;
}

/// The header: magic, versions, method, flags, an empty name, and a checksum.
pub(super) fn header() -> Vec<u8> {
    let mut fields = Vec::new();
    VERSIONS.iter().for_each(|version| fields.extend_from_slice(&version.to_be_bytes()));
    fields.extend_from_slice(&METHOD);
    fields.extend_from_slice(&FLAGS.to_be_bytes());
    // Mode, time in two halves, and an empty name.
    fields.extend_from_slice(&[0; 4 + 4 + 4 + 1]);
    let sum = adler32(&fields);
    [&MAGIC[..], &fields, &sum.to_be_bytes()].concat()
}

/// Appends the compressed blocks of a piece of the stream.
pub(super) fn blocks(piece: &[u8], out: &mut Vec<u8>) {
    let mut compressed = Vec::new();
    for block in piece.chunks(BLOCK_BYTES) {
        compressed.clear();
        lzo::compress(block, &mut compressed);
        // A block that does not become shorter is stored uncompressed, as the format requires.
        let body = if compressed.len() < block.len() { &compressed[..] } else { block };
        out.extend_from_slice(&(block.len() as u32).to_be_bytes());
        out.extend_from_slice(&(body.len() as u32).to_be_bytes());
        out.extend_from_slice(&adler32(block).to_be_bytes());
        out.extend_from_slice(body);
    }
}

/// The end of the file.
pub(super) const END: [u8; 4] = [0; 4];

/// A reader that decompresses an lzop file.
pub(super) struct Reader<R> {
    from: R,
    flags: Option<u32>,
    block: Vec<u8>,
    at: usize,
    is_over: bool,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, flags: None, block: Vec::new(), at: 0, is_over: false }
    }

    fn header(&mut self) -> io::Result<u32> {
        let magic: [u8; 9] = self.array()?;
        if magic != *MAGIC {
            return Err(bad("this is not an lzop header"));
        }
        let mut fields = Vec::new();
        let version = self.field::<2>(&mut fields).map(u16::from_be_bytes)?;
        if version < VERSIONS[2] {
            return Err(bad("written by an lzop older than 0.940"));
        }
        self.field::<4>(&mut fields)?;
        let [method, _] = self.field::<2>(&mut fields)?;
        if !(1..=3).contains(&method) {
            return Err(bad("a method that is not LZO1X"));
        }
        let flags = self.field::<4>(&mut fields).map(u32::from_be_bytes)?;
        if flags & (flag::FILTER | flag::MULTIPART) != 0 {
            return Err(bad("filters and parts are not supported"));
        }
        self.field::<12>(&mut fields)?;
        let [name] = self.field::<1>(&mut fields)?;
        for _ in 0..name {
            self.field::<1>(&mut fields)?;
        }
        let is_crc = flags & flag::HEADER_CRC32 != 0;
        let sum = if is_crc { crc32fast::hash(&fields) } else { adler32(&fields) };
        if self.word()? != sum {
            return Err(bad("the checksum of the header is wrong"));
        }
        if flags & flag::EXTRA_FIELD != 0 {
            let length = self.word()?;
            let mut field = (&mut self.from).take(u64::from(length) + 4);
            io::copy(&mut field, &mut io::sink())?;
        }
        Ok(flags)
    }

    fn next_block(&mut self) -> io::Result<()> {
        let flags = match self.flags {
            Some(flags) => flags,
            None => self.header()?,
        };
        self.flags = Some(flags);
        let length = self.word()? as usize;
        if length == 0 {
            self.is_over = true;
            return Ok(());
        }
        let compressed_length = self.word()? as usize;
        if length > MOST_BLOCK_BYTES || compressed_length > length {
            return Err(bad("the lengths of a block are impossible"));
        }
        let is_compressed = compressed_length < length;
        let mut sums = [None; 4];
        for (sum, wanted) in sums.iter_mut().zip([
            flags & flag::ADLER32_DATA != 0,
            flags & flag::CRC32_DATA != 0,
            flags & flag::ADLER32_PACKED != 0 && is_compressed,
            flags & flag::CRC32_PACKED != 0 && is_compressed,
        ]) {
            *sum = if wanted { Some(self.word()?) } else { None };
        }
        let mut body = Vec::new();
        (&mut self.from).take(compressed_length as u64).read_to_end(&mut body)?;
        if body.len() < compressed_length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let is_sound =
            |sum: Option<u32>, of: fn(&[u8]) -> u32, bytes: &[u8]| sum.is_none_or(|sum| sum == of(bytes));
        if !is_sound(sums[2], adler32, &body) || !is_sound(sums[3], crc32fast::hash, &body) {
            return Err(bad("the checksum of a compressed block is wrong"));
        }
        self.block = if is_compressed { lzo::decompress(&body, length).map_err(bad)? } else { body };
        if !is_sound(sums[0], adler32, &self.block) || !is_sound(sums[1], crc32fast::hash, &self.block) {
            return Err(bad("the checksum of a block is wrong"));
        }
        self.at = 0;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn field<const N: usize>(&mut self, fields: &mut Vec<u8>) -> io::Result<[u8; N]> {
        let bytes = self.array()?;
        fields.extend_from_slice(&bytes);
        Ok(bytes)
    }

    fn word(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.at == self.block.len() && !self.is_over && !to.is_empty() {
            self.next_block()?;
        }
        if self.is_over {
            return Ok(0);
        }
        let count = to.len().min(self.block.len() - self.at);
        to[..count].copy_from_slice(&self.block[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

fn bad(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

fn adler32(bytes: &[u8]) -> u32 {
    const BASE: u32 = 65_521;
    let (mut low, mut high) = (1u32, 0u32);
    // The sums of so many bytes cannot overflow 32 bits.
    for piece in bytes.chunks(5552) {
        for byte in piece {
            low += u32::from(*byte);
            high += low;
        }
        low %= BASE;
        high %= BASE;
    }
    high << 16 | low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(text: &[u8]) -> Vec<u8> {
        let mut file = header();
        blocks(text, &mut file);
        file.extend_from_slice(&END);
        file
    }

    #[test]
    fn adler32_of_known_text_is_the_known_sum() {
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn reader_of_file_cut_anywhere_fails() {
        let text: Vec<u8> = (0..600_000u32).flat_map(|n| (n / 7).to_le_bytes()).take(600_000).collect();
        let file = file_of(&text);
        let mut out = Vec::new();
        Reader::new(&file[..]).read_to_end(&mut out).unwrap();
        assert!(out == text);

        for length in (0..file.len()).step_by(97).chain(file.len() - 8..file.len()) {
            assert!(Reader::new(&file[..length]).read_to_end(&mut Vec::new()).is_err(), "{length}");
        }
    }

    #[test]
    fn reader_of_damaged_block_notices_the_checksum() {
        let text = vec![7; 5000];
        let mut file = file_of(&text);
        let last = file.len() - 12;
        file[last] ^= 0x10;
        let error = Reader::new(&file[..]).read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }
}
