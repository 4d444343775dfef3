//! Receivers of an image's pages.

use crate::error::ImageError;

/// Receives the pages of an image.
pub trait PageVisitor {
    /// Receives pages of block `block` from page `first`; `content` is a whole number of pages.
    ///
    /// # Errors
    /// An error of the visitor. It ends the visit.
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError>;

    /// Receives `count` zero pages from page `first`.
    ///
    /// # Errors
    /// An error of the visitor. It ends the visit.
    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError>;
}
