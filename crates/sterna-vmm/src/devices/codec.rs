//! How bodies are written and read: a list of fields, each a four-letter tag, a little-endian u32 length,
//! and so many bytes. A body has each of its fields once; the reader takes them by tag and in the end
//! refuses what nobody took.

use std::io;

use crate::kvm::{Plain, bytes_of, from_bytes};

/// A field's name.
pub(crate) type Tag = [u8; 4];

/// Why a device's state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The body ends inside a field.
    #[error("the body of {len} bytes ends inside the field at byte {at}")]
    Truncated {
        /// Offset of the field in the body.
        at: usize,
        /// The body's length.
        len: usize,
    },
    /// A field comes twice.
    #[error("field {0:?} comes twice")]
    Duplicate(String),
    /// A field that must be there is not.
    #[error("field {0:?} is missing")]
    Missing(String),
    /// A field that this version does not know.
    #[error("field {0:?} is unknown; the source may be newer")]
    Unknown(String),
    /// A field has the wrong length.
    #[error("field {field:?} has {got} bytes, {expected} are right")]
    Length {
        /// Which field.
        field: String,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: String,
    },
    /// A field holds a value that cannot be.
    #[error("field {field:?}: {why}")]
    Value {
        /// Which field.
        field: String,
        /// What is wrong.
        why: String,
    },
    /// The two sides differ where they must not.
    #[error("{what}: the source has {theirs}, this machine has {ours}")]
    Mismatch {
        /// What differs.
        what: String,
        /// The source's.
        theirs: String,
        /// This machine's.
        ours: String,
    },
    /// The kernel refused the state.
    #[error("{call}: {source}")]
    Kernel {
        /// Which call.
        call: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// A section came before one that must precede it.
    #[error("it came before section {missing}")]
    Order {
        /// The section that should have come first.
        missing: String,
    },
    /// A section came twice.
    #[error("it came twice")]
    Twice,
}

impl StateError {
    pub(crate) fn value(tag: Tag, why: impl Into<String>) -> Self {
        Self::Value { field: name(tag), why: why.into() }
    }
}

/// For `map_err`: the kernel refused `call`.
pub(crate) fn kernel(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Kernel { call, source: io::Error::from_raw_os_error(error.errno()) }
}

fn name(tag: Tag) -> String {
    tag.escape_ascii().to_string()
}

/// Writes a body.
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

/// A body that was taken apart.
#[derive(Debug)]
pub(crate) struct Fields<'a>(Vec<(Tag, &'a [u8])>);

impl<'a> Fields<'a> {
    /// Takes a body apart; the number of fields is bounded by its length.
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

    /// Refuses what is left.
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
