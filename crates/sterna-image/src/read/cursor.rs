//! A window over a stream, with the current offset for errors.

use std::io;
use std::sync::Arc;

use super::source::Input;
use super::tee::Tee;
use crate::compression::Damaged;
use crate::error::ImageError;

/// Buffer sizes in bytes: at first, and later. The first is small because many readers need only the head of a
/// stream.
const FIRST: usize = 16 << 10;
const CHUNK: usize = 256 << 10;
/// Explains why a mapped-ram image is not read front to back.
pub(super) const MAPPED_NEEDS_RANDOM_ACCESS: &str =
    "a mapped-ram image needs a file with random access, not a pipe or a compressed stream";

/// Reads the stream front to back, with a look ahead.
pub(crate) struct Cursor {
    input: Box<dyn Input>,
    file: Arc<str>,
    buffer: Vec<u8>,
    /// The unread part of `buffer`.
    start: usize,
    end: usize,
    /// Offset of the next byte: in the file, or in the decompressed stream.
    position: u64,
    at_end: bool,
    /// Whether unrelated bytes can follow the image, because it is on a block device.
    ends_anywhere: bool,
    /// Receives a copy of the consumed bytes; `given` is the copied part of the buffer.
    tee: Option<Tee>,
    given: usize,
}

impl Cursor {
    pub(crate) fn new(input: Box<dyn Input>, file: Arc<str>, position: u64) -> Self {
        let buffer = vec![0; FIRST];
        Self {
            input,
            file,
            buffer,
            start: 0,
            end: 0,
            position,
            at_end: false,
            ends_anywhere: false,
            tee: None,
            given: 0,
        }
    }

    /// Also copies consumed bytes to `tee`.
    pub(crate) fn copied_to(mut self, tee: Option<Tee>) -> Self {
        self.tee = tee;
        self
    }

    /// Sets whether bytes after the image are unrelated to it.
    pub(crate) fn set_ends_anywhere(&mut self, ends_anywhere: bool) {
        self.ends_anywhere = ends_anywhere;
    }

    /// Whether bytes after the image are unrelated to it.
    pub(crate) fn ends_anywhere(&self) -> bool {
        self.ends_anywhere
    }

    /// Holds back further copies until the tee is released.
    pub(crate) fn hold(&mut self) -> Result<(), ImageError> {
        self.give()?;
        self.tee.iter().for_each(Tee::hold);
        Ok(())
    }

    /// Copies the consumed bytes to the tee. Called at the end, and before the buffer is reused.
    pub(crate) fn give(&mut self) -> Result<(), ImageError> {
        if let Some(tee) = self.tee.as_ref().filter(|_| self.given < self.start) {
            let taken = tee.take(&self.buffer[self.given..self.start]);
            taken.map_err(|error| explain(error, &self.file))?;
        }
        self.given = self.start;
        Ok(())
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// Returns all buffered bytes: at least `count` if the stream has them.
    pub(crate) fn peek(&mut self, count: usize) -> Result<&[u8], ImageError> {
        while self.end - self.start < count && !self.at_end {
            let is_full = self.end == self.buffer.len();
            if is_full || self.buffer.len() >= CHUNK && self.buffer.len() - self.start < count {
                self.give()?;
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                (self.start, self.given) = (0, 0);
                // A stream that fills the first buffer gets a large buffer.
                let wanted = if self.buffer.len() < CHUNK { CHUNK } else { count.next_multiple_of(CHUNK) };
                if is_full && self.buffer.len() < wanted {
                    self.buffer.resize(wanted, 0);
                }
            }
            self.fill()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Returns the buffered bytes: at least one unless the stream is at its end.
    pub(crate) fn some(&mut self) -> Result<&[u8], ImageError> {
        if self.start == self.end {
            if self.end == self.buffer.len() && self.end < CHUNK {
                self.buffer.resize(CHUNK, 0);
            }
            self.give()?;
            (self.start, self.end, self.given) = (0, 0, 0);
        }
        self.peek(1)
    }

    /// Skips `count` bytes that [`peek`](Self::peek) returned.
    pub(crate) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.start);
        self.start += count;
        self.position += count as u64;
    }

    /// Returns the next `count` bytes without consuming them. Fails if the stream ends before.
    pub(crate) fn need(&mut self, count: usize, what: &'static str) -> Result<&[u8], ImageError> {
        let have = self.peek(count)?.len();
        if have < count {
            return Err(self.torn(have, what));
        }
        Ok(&self.buffer[self.start..self.start + count])
    }

    /// Consumes and returns `N` bytes; fails if the stream ends before.
    pub(crate) fn take<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], ImageError> {
        let mut out = [0; N];
        out.copy_from_slice(self.need(N, what)?);
        self.consume(N);
        Ok(out)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, ImageError> {
        Ok(self.take::<1>(what)?[0])
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, ImageError> {
        Ok(u64::from_be_bytes(self.take(what)?))
    }

    /// Continues at byte `position`.
    pub(crate) fn jump(&mut self, position: u64) -> Result<(), ImageError> {
        let ahead =
            position.checked_sub(self.position).filter(|ahead| *ahead <= (self.end - self.start) as u64);
        if let Some(ahead) = ahead {
            self.consume(ahead as usize);
            return Ok(());
        }
        if !self.input.jump(position) {
            return Err(self.unsupported(MAPPED_NEEDS_RANDOM_ACCESS, "specs/mapped-ram.md §4.1"));
        }
        // Only mapped-ram images are read with jumps, and only legacy streams are copied.
        self.tee = None;
        (self.start, self.end, self.at_end) = (0, 0, false);
        self.position = position;
        Ok(())
    }

    /// An error at the byte `back` before the current one.
    pub(crate) fn broken(&self, back: u64, paragraph: &'static str, rule: impl Into<String>) -> ImageError {
        let offset = self.position.saturating_sub(back);
        ImageError::Broken { file: self.file.to_string(), offset, rule: rule.into(), paragraph }
    }

    pub(crate) fn unsupported(&self, rule: impl Into<String>, paragraph: &'static str) -> ImageError {
        ImageError::Unsupported { file: self.file.to_string(), rule: rule.into(), paragraph }
    }

    /// An error: the stream ends `have` bytes after the current position.
    pub(crate) fn torn(&self, have: usize, what: &'static str) -> ImageError {
        ImageError::Torn { file: self.file.to_string(), offset: self.position + have as u64, what }
    }

    fn fill(&mut self) -> Result<(), ImageError> {
        let read = self.input.read(&mut self.buffer[self.end..]);
        let count = read.map_err(|error| explain(error, &self.file))?;
        self.at_end = count == 0;
        self.end += count;
        Ok(())
    }
}

/// Converts an error of the input: a codec's, the tee's, or the system's.
fn explain(error: io::Error, file: &str) -> ImageError {
    let error = match error.downcast::<Damaged>() {
        Ok(Damaged { compression, reason, decompressed, compressed }) => {
            return ImageError::Compression {
                file: file.to_owned(),
                compression,
                reason,
                decompressed,
                compressed,
            };
        }
        Err(error) => error,
    };
    error.downcast::<ImageError>().unwrap_or_else(|error| ImageError::io(file, "read", error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::source::Piped;

    /// Returns at most `.2` bytes in one read.
    struct Drops(Vec<u8>, usize, usize);

    impl io::Read for Drops {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let count = to.len().min(self.2).min(self.0.len() - self.1);
            to[..count].copy_from_slice(&self.0[self.1..self.1 + count]);
            self.1 += count;
            Ok(count)
        }
    }

    #[test]
    fn cursor_gives_every_byte_whatever_is_asked_for_and_however_they_come() {
        let bytes: Vec<u8> = (0..3 * CHUNK + 77).map(|at| (at / 251 + at) as u8).collect();
        for at_once in [1000, FIRST, usize::MAX] {
            for step in [1500, FIRST - 1, FIRST, FIRST + 1, CHUNK, CHUNK + 1, 2 * CHUNK] {
                let input = Piped(Drops(bytes.clone(), 0, at_once));
                let mut cursor = Cursor::new(Box::new(input), "drops".into(), 0);
                let mut out = Vec::new();
                loop {
                    let ahead = cursor.peek(step).unwrap();
                    let count = step.min(ahead.len());
                    out.extend_from_slice(&ahead[..count]);
                    cursor.consume(count);
                    let some = cursor.some().unwrap();
                    let Some(&byte) = some.first() else { break };
                    out.push(byte);
                    cursor.consume(1);
                }
                assert!(out == bytes, "{step} of {at_once}");
                assert_eq!(cursor.position(), bytes.len() as u64);
            }
        }
    }
}
