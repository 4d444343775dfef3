//! A cursor over received bytes that remembers the position of the current field.
//!
//! Decoders use it with `?`, and both missing bytes and wrong bytes end them with a [`Stop`]. [`decode`] then
//! separates the two cases.

use crate::error::WireError;
use std::borrow::Cow;

/// The reason why a decoder stopped early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Bytes are missing. The message must have at least so many bytes before a retry.
    Short(usize),
    /// The bytes break a rule.
    Bad(WireError),
}

impl From<WireError> for Stop {
    fn from(error: WireError) -> Self {
        Stop::Bad(error)
    }
}

/// Runs `body` over `buf`. Returns the value and its length; `None` if bytes are missing.
pub(crate) fn decode<'a, T>(
    buf: &'a [u8],
    message: &'static str,
    body: impl FnOnce(&mut Reader<'a>) -> Result<T, Stop>,
) -> Result<Option<(T, usize)>, WireError> {
    let mut reader = Reader::new(buf, message);
    match body(&mut reader) {
        Ok(value) => Ok(Some((value, reader.at()))),
        Err(Stop::Short(_)) => Ok(None),
        Err(Stop::Bad(error)) => Err(error),
    }
}

/// The position in the received bytes, and the start of the last field for errors.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    buf: &'a [u8],
    at: usize,
    field: usize,
    message: &'static str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(buf: &'a [u8], message: &'static str) -> Self {
        Self { buf, at: 0, field: 0, message }
    }

    /// Number of bytes read so far.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The bytes that have not been read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.buf[self.at..]
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Stop> {
        let end = self.at.checked_add(count).ok_or(Stop::Short(usize::MAX))?;
        let bytes = self.buf.get(self.at..end).ok_or(Stop::Short(end))?;
        self.field = self.at;
        self.at = end;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Stop> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Stop> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Stop> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Stop> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A name with a one-byte length: 1 to 255 bytes of UTF-8 without NUL (§9).
    pub(crate) fn name(&mut self) -> Result<&'a str, Stop> {
        let length = usize::from(self.u8()?);
        if length == 0 {
            return Err(self.bad("specs/stream.md §9", "a name must not be empty"));
        }
        let bytes = self.take(length)?;
        self.text(bytes)
    }

    /// Checks that `bytes`, the last field, is UTF-8 without NUL.
    pub(crate) fn text(&self, bytes: &'a [u8]) -> Result<&'a str, Stop> {
        if bytes.contains(&0) {
            return Err(self.bad("specs/stream.md §9", "a name must not contain NUL"));
        }
        std::str::from_utf8(bytes).map_err(|_| self.bad("specs/stream.md §9", "a name must be UTF-8"))
    }

    /// The error for a broken rule in the last field.
    pub(crate) fn bad(&self, paragraph: &'static str, rule: impl Into<Cow<'static, str>>) -> Stop {
        Stop::Bad(WireError::misbehaved(self.message, self.field as u64, paragraph, rule))
    }

    /// The error for a last field that does not match this side's expectations.
    pub(crate) fn unfit(&self, paragraph: &'static str, rule: impl Into<Cow<'static, str>>) -> Stop {
        Stop::Bad(WireError::incompatible(self.message, self.field as u64, paragraph, rule))
    }
}
