//! The part of XDR (RFC 4506) that libvirt's RPC needs here: 32-bit and 64-bit numbers, bytes, strings, options.

/// Largest string, in bytes. libvirt refuses to decode longer ones.
pub const STRING_BYTES: usize = 4 << 20;

/// A value that does not have the form that the procedure defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XdrError {
    /// The data ends inside a value.
    #[error("the data ends inside {what}")]
    Truncated {
        /// Name of the value.
        what: &'static str,
    },
    /// A string or a list is longer than its limit.
    #[error("{what} has {length} bytes or elements, more than {limit}")]
    TooLong {
        /// Name of the value.
        what: &'static str,
        /// Its stated length.
        length: usize,
        /// Largest permitted length.
        limit: usize,
    },
    /// A string is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotText {
        /// Name of the value.
        what: &'static str,
    },
    /// The marker of an optional value is neither 0 nor 1.
    #[error("the marker of the optional {what} is {marker}, and not 0 or 1")]
    Marker {
        /// Name of the value.
        what: &'static str,
        /// The marker.
        marker: u32,
    },
}

/// Encodes values one after the other.
#[derive(Debug, Clone, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Appends a 32-bit number without a sign.
    pub fn u32(mut self, number: u32) -> Self {
        self.bytes.extend(number.to_be_bytes());
        self
    }

    /// Appends a 32-bit number with a sign.
    pub fn i32(mut self, number: i32) -> Self {
        self.bytes.extend(number.to_be_bytes());
        self
    }

    /// Appends bytes of a fixed length, which is a multiple of 4.
    pub fn fixed(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Appends a string: length, bytes, zeros up to a multiple of 4.
    pub fn string(mut self, text: &str) -> Self {
        self = self.u32(text.len() as u32);
        self.bytes.extend(text.as_bytes());
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    /// The encoded bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Decodes values one after the other. Allocates no memory by a stated length.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes that were not decoded.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The next 32-bit number without a sign.
    ///
    /// # Errors
    /// [`XdrError::Truncated`] with `what`, as in the other methods.
    pub fn u32(&mut self, what: &'static str) -> Result<u32, XdrError> {
        self.array(what).map(u32::from_be_bytes)
    }

    /// The next 32-bit number with a sign.
    pub fn i32(&mut self, what: &'static str) -> Result<i32, XdrError> {
        self.array(what).map(i32::from_be_bytes)
    }

    /// The next 64-bit number with a sign.
    pub fn i64(&mut self, what: &'static str) -> Result<i64, XdrError> {
        self.array(what).map(i64::from_be_bytes)
    }

    /// The next `N` bytes. `N` is a multiple of 4.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], XdrError> {
        let (value, rest) = self.rest.split_first_chunk().ok_or(XdrError::Truncated { what })?;
        self.rest = rest;
        Ok(*value)
    }

    /// The next string, of at most [`STRING_BYTES`].
    ///
    /// # Errors
    /// The data ends, the string is too long, or it is not UTF-8.
    pub fn string(&mut self, what: &'static str) -> Result<&'a str, XdrError> {
        let length = self.length(what, STRING_BYTES)?;
        let padded = length.next_multiple_of(4);
        let (text, rest) = self.rest.split_at_checked(padded).ok_or(XdrError::Truncated { what })?;
        self.rest = rest;
        str::from_utf8(&text[..length]).map_err(|_| XdrError::NotText { what })
    }

    /// The next string, if its marker is 1.
    ///
    /// # Errors
    /// Those of [`string`](Self::string), and a marker that is neither 0 nor 1.
    pub fn optional_string(&mut self, what: &'static str) -> Result<Option<&'a str>, XdrError> {
        match self.u32(what)? {
            0 => Ok(None),
            1 => self.string(what).map(Some),
            marker => Err(XdrError::Marker { what, marker }),
        }
    }

    /// The next length of a list or a string.
    ///
    /// # Errors
    /// It is more than `limit`.
    pub fn length(&mut self, what: &'static str, limit: usize) -> Result<usize, XdrError> {
        let length = self.u32(what)? as usize;
        if length > limit {
            return Err(XdrError::TooLong { what, length, limit });
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn string_is_padded_to_four_bytes() {
        let bytes = Writer::default().string("web12").u32(7).into_bytes();

        assert_eq!(bytes, b"\0\0\0\x05web12\0\0\0\0\0\0\x07");
        let mut reader = Reader::new(&bytes);
        assert_eq!((reader.string("name"), reader.u32("id")), (Ok("web12"), Ok(7)));
        assert!(reader.rest().is_empty());
    }

    #[test]
    fn wrong_values_are_named() {
        let what = "x";

        assert_eq!(Reader::new(b"\0\0\0").u32(what), Err(XdrError::Truncated { what }));
        assert_eq!(Reader::new(b"\0\0\0\x05abcde\0\0").string(what), Err(XdrError::Truncated { what }));
        assert_eq!(Reader::new(b"\0\0\0\x01\xff\0\0\0").string(what), Err(XdrError::NotText { what }));
        assert_eq!(
            Reader::new(b"\xff\0\0\0").string(what),
            Err(XdrError::TooLong { what, length: 0xff00_0000, limit: STRING_BYTES })
        );
        assert_eq!(
            Reader::new(b"\0\0\0\x02").optional_string(what),
            Err(XdrError::Marker { what, marker: 2 })
        );
        assert_eq!(Reader::new(b"\0\0\0\0").optional_string(what), Ok(None));
    }
}
