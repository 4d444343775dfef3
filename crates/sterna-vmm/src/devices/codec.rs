//! Encodes and decodes the bodies of device sections. A body is a list of fields: a four-letter tag, a
//! little-endian u32 length, and that many bytes. A body contains each field once. The reader takes fields by
//! tag and refuses the fields that remain.

use std::io;

use crate::kvm::{Plain, bytes_of, from_bytes};

/// Tag of a field: four ASCII letters.
pub(crate) type Tag = [u8; 4];

/// Why a device's state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The body ends inside a field.
    #[error("the body of {len} bytes ends inside the field at byte {at}")]
    Truncated {
        /// Offset of the field in the body, in bytes.
        at: usize,
        /// The body's length in bytes.
        len: usize,
    },
    /// A field occurs more than once.
    #[error("field {0:?} occurs twice")]
    Duplicate(String),
    /// A required field is missing.
    #[error("field {0:?} is missing")]
    Missing(String),
    /// A field that this version does not know.
    #[error("field {0:?} is unknown; the source may be newer")]
    Unknown(String),
    /// A field has the wrong length.
    #[error("field {field:?} has {got} bytes instead of {expected}")]
    Length {
        /// Tag of the field with the wrong length.
        field: String,
        /// The field's length in the body, in bytes.
        got: usize,
        /// The length that the field must have.
        expected: String,
    },
    /// A field has a value outside its range.
    #[error("field {field:?}: {why}")]
    Value {
        /// Tag of the field with the invalid value.
        field: String,
        /// Why the value is invalid.
        why: String,
    },
    /// Source and destination differ in something that must be equal.
    #[error("{what}: the source has {theirs}, this machine has {ours}")]
    Mismatch {
        /// Name of the property that differs.
        what: String,
        /// Value of the source.
        theirs: String,
        /// Value of this machine.
        ours: String,
    },
    /// The kernel refused the state.
    #[error("{call}: {source}")]
    Kernel {
        /// Name of the call, such as `KVM_SET_REGS`.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// A section arrived before a section that must precede it.
    #[error("it arrived before section {missing}")]
    Order {
        /// The section that should have come first.
        missing: String,
    },
    /// The same section arrived twice.
    #[error("it arrived twice")]
    Twice,
}

impl StateError {
    pub(crate) fn value(tag: Tag, why: impl Into<String>) -> Self {
        Self::Value { field: name(tag), why: why.into() }
    }
}

/// Builds the error of a refused `call`, for `map_err`.
pub(crate) fn kernel(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Kernel { call, source: io::Error::from_raw_os_error(error.errno()) }
}

fn name(tag: Tag) -> String {
    tag.escape_ascii().to_string()
}

/// A body that is being written.
#[derive(Debug, Default)]
pub(crate) struct Body(Vec<u8>);

impl Body {
    pub(crate) fn bytes(&mut self, tag: Tag, bytes: &[u8]) {
        self.0.extend(tag);
        self.0.extend((bytes.len() as u32).to_le_bytes());
        self.0.extend(bytes);
    }

    pub(crate) fn plain<T: Plain>(&mut self, tag: Tag, value: &T) {
        self.bytes(tag, bytes_of(value));
    }

    pub(crate) fn u64(&mut self, tag: Tag, value: u64) {
        self.bytes(tag, &value.to_le_bytes());
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// The fields of a received body that the reader has not taken yet.
#[derive(Debug)]
pub(crate) struct Fields<'a>(Vec<(Tag, &'a [u8])>);

impl<'a> Fields<'a> {
    /// Splits a body into fields. The body's length bounds the number of fields.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, StateError> {
        let mut fields: Vec<(Tag, &[u8])> = Vec::new();
        let mut at = 0;
        while at < body.len() {
            let field = split(&body[at..]).ok_or(StateError::Truncated { at, len: body.len() })?;
            if fields.iter().any(|known| known.0 == field.0) {
                return Err(StateError::Duplicate(name(field.0)));
            }
            fields.push(field);
            at += 8 + field.1.len();
        }
        Ok(Self(fields))
    }

    pub(crate) fn optional(&mut self, tag: Tag) -> Option<&'a [u8]> {
        let at = self.0.iter().position(|field| field.0 == tag)?;
        Some(self.0.swap_remove(at).1)
    }

    pub(crate) fn bytes(&mut self, tag: Tag) -> Result<&'a [u8], StateError> {
        self.optional(tag).ok_or_else(|| StateError::Missing(name(tag)))
    }

    pub(crate) fn plain<T: Plain>(&mut self, tag: Tag) -> Result<T, StateError> {
        let bytes = self.bytes(tag)?;
        from_bytes(bytes).ok_or_else(|| length(tag, bytes.len(), size_of::<T>()))
    }

    pub(crate) fn optional_plain<T: Plain>(&mut self, tag: Tag) -> Result<Option<T>, StateError> {
        let Some(bytes) = self.optional(tag) else { return Ok(None) };
        from_bytes(bytes).map(Some).ok_or_else(|| length(tag, bytes.len(), size_of::<T>()))
    }

    pub(crate) fn u64(&mut self, tag: Tag) -> Result<u64, StateError> {
        let bytes = self.bytes(tag)?;
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| length(tag, bytes.len(), 8))
    }

    /// Refuses fields that the reader has not taken.
    pub(crate) fn finish(&self) -> Result<(), StateError> {
        self.0.first().map_or(Ok(()), |field| Err(StateError::Unknown(name(field.0))))
    }
}

pub(crate) fn length(tag: Tag, got: usize, expected: impl ToString) -> StateError {
    StateError::Length { field: name(tag), got, expected: expected.to_string() }
}

fn split(bytes: &[u8]) -> Option<(Tag, &[u8])> {
    let (tag, rest) = bytes.split_first_chunk::<4>()?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
    Some((*tag, rest.get(..len)?))
}
