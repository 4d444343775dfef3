//! Writes to a disk that are not in its file yet.

use std::collections::BTreeMap;

/// Data pieces do not cross multiples of this size. A write into a piece therefore copies at most this many bytes.
pub(super) const CHUNK_BYTES: u64 = 64 << 10;
/// Memory of a piece in addition to its data, in bytes.
pub(super) const NOTE_BYTES: u64 = 128;

/// Written bytes, by their offset on the disk.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    /// Pieces by the offset of their first byte. They do not overlap.
    pieces: BTreeMap<u64, Piece>,
    bytes: u64,
}

#[derive(Debug)]
struct Piece {
    length: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Data(Box<[u8]>),
    Zeros,
}

/// Content of a written piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written<'a> {
    Data(&'a [u8]),
    Zeros(u64),
}

impl Overlay {
    /// Approximate memory use, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Upper bound of the growth by a write of `length` bytes. Zeros need no memory for data.
    pub(super) fn most_growth(length: u64, is_zero: bool) -> u64 {
        // The write may split a piece at each of its ends.
        match is_zero {
            true => 2 * NOTE_BYTES,
            false => length + (length / CHUNK_BYTES + 3) * NOTE_BYTES,
        }
    }

    pub(super) fn write(&mut self, at: u64, data: &[u8]) {
        self.clear(at, data.len() as u64);
        let (mut at, mut left) = (at, data);
        while !left.is_empty() {
            let room = (CHUNK_BYTES - at % CHUNK_BYTES) as usize;
            let (head, rest) = left.split_at(left.len().min(room));
            self.put(at, head.len() as u64, Content::Data(head.into()));
            (at, left) = (at + head.len() as u64, rest);
        }
    }

    pub(super) fn zero(&mut self, at: u64, length: u64) {
        self.clear(at, length);
        if length > 0 {
            self.put(at, length, Content::Zeros);
        }
    }

    /// Copies written bytes to `to`, whose first byte is `at`. Other bytes of `to` stay unchanged.
    pub(super) fn copy_to(&self, at: u64, to: &mut [u8]) {
        let end = at + to.len() as u64;
        let first = self.pieces.range(..=at).next_back().map_or(at, |(start, _)| *start);
        for (start, piece) in self.pieces.range(first..end) {
            let (from, until) = (at.max(*start), end.min(start + piece.length));
            if from >= until {
                continue;
            }
            let to = &mut to[(from - at) as usize..(until - at) as usize];
            match &piece.content {
                Content::Data(data) => {
                    to.copy_from_slice(&data[(from - start) as usize..(until - start) as usize]);
                }
                Content::Zeros => to.fill(0),
            }
        }
    }

    /// All written pieces, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Written<'_>)> {
        self.pieces.iter().map(|(start, piece)| {
            let written = match &piece.content {
                Content::Data(data) => Written::Data(data),
                Content::Zeros => Written::Zeros(piece.length),
            };
            (*start, written)
        })
    }

    fn put(&mut self, at: u64, length: u64, content: Content) {
        self.bytes += cost(&content);
        self.pieces.insert(at, Piece { length, content });
    }

    /// Drops the written bytes in this range.
    fn clear(&mut self, at: u64, length: u64) {
        let end = at + length;
        let before = self.pieces.range(..at).next_back().map(|(start, piece)| (*start, start + piece.length));
        if let Some((start, until)) = before
            && until > at
            && let Some(piece) = self.take(start)
        {
            self.put_part(start, &piece, start, at);
            self.put_part(start, &piece, end, until);
        }
        while let Some(start) = self.pieces.range(at..end).next().map(|(start, _)| *start)
            && let Some(piece) = self.take(start)
        {
            self.put_part(start, &piece, end, start + piece.length);
        }
    }

    fn take(&mut self, start: u64) -> Option<Piece> {
        let piece = self.pieces.remove(&start)?;
        self.bytes -= cost(&piece.content);
        Some(piece)
    }

    /// Inserts bytes `from` to `until` of a removed piece again, if the range is not empty. The piece began at
    /// `start`.
    fn put_part(&mut self, start: u64, piece: &Piece, from: u64, until: u64) {
        if from >= until {
            return;
        }
        let content = match &piece.content {
            Content::Data(data) => {
                Content::Data(data[(from - start) as usize..(until - start) as usize].into())
            }
            Content::Zeros => Content::Zeros,
        };
        self.put(from, until - from, content);
    }
}

fn cost(content: &Content) -> u64 {
    NOTE_BYTES
        + match content {
            Content::Data(data) => data.len() as u64,
            Content::Zeros => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlay_is_as_a_disk_to_which_all_was_written() {
        const BYTES: u64 = 300_000;
        let mut random = fastrand::Rng::with_seed(17);
        for round in 0..60 {
            let mut overlay = Overlay::default();
            let mut model: Vec<Option<u8>> = vec![None; BYTES as usize];
            for step in 1..=200u32 {
                let length = if round % 2 == 0 { random.u64(0..2000) } else { random.u64(0..BYTES / 2) };
                let at = random.u64(..BYTES - length);
                let (before, value) = (overlay.bytes(), step as u8);
                let is_zero = random.u8(..4) == 0;
                match is_zero {
                    true => overlay.zero(at, length),
                    false => overlay.write(at, &vec![value; length as usize]),
                }
                let grown = overlay.bytes().saturating_sub(before);
                assert!(grown <= Overlay::most_growth(length, is_zero), "{grown} for {length}");
                model[at as usize..][..length as usize].fill(Some(if is_zero { 0 } else { value }));
            }
            let mut read = vec![0xee; BYTES as usize];
            overlay.copy_to(0, &mut read);
            let expected: Vec<u8> = model.iter().map(|byte| byte.unwrap_or(0xee)).collect();
            assert!(read == expected);
            let (at, length) = (random.usize(..1000), random.usize(1..5000));
            let mut part = vec![0xee; length];
            overlay.copy_to(at as u64, &mut part);
            assert!(part == expected[at..at + length]);
            let (mut end, mut bytes) = (0, 0);
            for (at, written) in overlay.iter() {
                assert!(at >= end, "no overlap");
                let length = match written {
                    Written::Data(data) => data.len() as u64,
                    Written::Zeros(length) => length,
                };
                end = at + length;
                bytes += NOTE_BYTES + if matches!(written, Written::Data(_)) { length } else { 0 };
            }
            assert_eq!(bytes, overlay.bytes());
        }
    }
}
