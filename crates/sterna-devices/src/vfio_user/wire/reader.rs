//! Takes a payload apart, field by field.

use super::error::WireError;
use super::header::HEADER_BYTES;

/// A message's payload, with a place in it.
#[derive(Debug, Clone)]
pub struct Payload<'a> {
    message: &'static str,
    bytes: &'a [u8],
    /// Where `bytes` begins in the message.
    base: usize,
    at: usize,
}

impl<'a> Payload<'a> {
    /// The bytes behind the header of a message, which errors will call `message`.
    pub fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Self { message, bytes, base: HEADER_BYTES, at: 0 }
    }

    /// Bytes that begin `offset` bytes behind the header.
    pub(super) fn new_at(message: &'static str, bytes: &'a [u8], offset: usize) -> Self {
        Self { message, bytes, base: HEADER_BYTES + offset, at: 0 }
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// The next `len` bytes.
    pub(super) fn bytes(&mut self, field: &'static str, len: u64) -> Result<&'a [u8], WireError> {
        let rest = self.bytes.get(self.at..).unwrap_or(&[]);
        let taken = usize::try_from(len).ok().and_then(|len| rest.get(..len));
        let taken = taken.ok_or(WireError::Truncated {
            message: self.message,
            at: self.base + self.at,
            field,
            needed: len,
            left: rest.len() as u64,
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    /// Everything that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        let rest = self.bytes.get(self.at..).unwrap_or(&[]);
        self.at = self.bytes.len();
        rest
    }

    /// How many bytes are left.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Where the next field begins, counted from the header's first byte.
    pub(super) fn place(&self) -> usize {
        self.base + self.at
    }

    /// The message's name in errors.
    pub(super) fn message(&self) -> &'static str {
        self.message
    }

    /// Refuses what is left.
    pub(super) fn finish(&self) -> Result<(), WireError> {
        match self.left() {
            0 => Ok(()),
            left => Err(WireError::Trailing { message: self.message, at: self.place(), left: left as u64 }),
        }
    }

    /// An error about the field of `bytes` bytes that was just taken.
    pub(super) fn bad(&self, field: &'static str, bytes: usize, value: u64, rule: &'static str) -> WireError {
        WireError::Value { message: self.message, at: self.place() - bytes, field, value, rule }
    }

    /// The `argsz` in front of most payloads: the bytes of the payload that the sender has room for. It must have
    /// room for the fixed part at least.
    pub(super) fn argsz(&mut self, least: u32) -> Result<u32, WireError> {
        let argsz = self.u32("argsz")?;
        if argsz < least {
            let rule = "the fixed part of the payload does not fit into that";
            return Err(self.bad("argsz", 4, argsz.into(), rule));
        }
        Ok(argsz)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N as u64)?);
        Ok(array)
    }
}
