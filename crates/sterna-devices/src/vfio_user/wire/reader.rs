//! Reads a payload field by field.

use super::error::WireError;
use super::header::HEADER_BYTES;

/// A message's payload and the read position in it.
#[derive(Debug, Clone)]
pub struct Payload<'a> {
    message: &'static str,
    bytes: &'a [u8],
    /// Offset of `bytes` in the message.
    base: usize,
    at: usize,
}

impl<'a> Payload<'a> {
    /// Reads the bytes after a message's header. Errors use the name `message`.
    pub fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Self { message, bytes, base: HEADER_BYTES, at: 0 }
    }

    /// Reads bytes that begin `offset` bytes after the header.
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

    /// Takes the next `len` bytes.
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

    /// Takes all remaining bytes.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        let rest = self.bytes.get(self.at..).unwrap_or(&[]);
        self.at = self.bytes.len();
        rest
    }

    /// Number of remaining bytes.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Offset of the next field, counted from the first byte of the header.
    pub(super) fn place(&self) -> usize {
        self.base + self.at
    }

    /// The message's name, for errors.
    pub(super) fn message(&self) -> &'static str {
        self.message
    }

    /// Fails if bytes remain.
    pub(super) fn finish(&self) -> Result<(), WireError> {
        match self.left() {
            0 => Ok(()),
            left => Err(WireError::Trailing { message: self.message, at: self.place(), left: left as u64 }),
        }
    }

    /// The error for an invalid value of the field that was just taken. The field has `bytes` bytes.
    pub(super) fn bad(&self, field: &'static str, bytes: usize, value: u64, rule: &'static str) -> WireError {
        WireError::Value { message: self.message, at: self.place() - bytes, field, value, rule }
    }

    /// Reads `argsz`, which begins most payloads. It is the number of payload bytes that the sender has room
    /// for, and must include at least the fixed part.
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
