//! Compressed streams as they were before.

/// A codec's word on damaged input, carried through `io::Error`.
#[derive(Debug, thiserror::Error)]
#[error("{packing}: {reason}")]
pub(crate) struct Damaged {
    pub(crate) packing: &'static str,
    pub(crate) reason: String,
}
