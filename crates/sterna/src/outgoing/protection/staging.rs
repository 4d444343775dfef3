//! The interface to the memory in which pages of checkpoints wait until they are sent.

use sterna_ram::DirtyBitmaps;

use crate::error::MigrationError;
use crate::outgoing::guest_source::PageReader;

/// Keeps the pages of checkpoints as they were at the pause, while the guest runs. Lanes read them as a
/// [`PageReader`].
///
/// The control thread calls all methods of this trait. Lanes read guest RAM itself unless
/// [`send_next`](Self::send_next) was called.
pub trait Staging: PageReader {
    /// The most bytes of pages that are kept.
    fn limit_bytes(&self) -> u64;
    /// Copies pages of the next checkpoint while the guest runs. Returns false if there is no room.
    ///
    /// The caller has re-armed all of these pages before. Pages that are written after that must be among the
    /// pages of [`stage`](Self::stage). The call discards an earlier copy ahead.
    ///
    /// # Errors
    /// Reading guest memory failed.
    fn stage_ahead(&self, pages: &DirtyBitmaps) -> Result<bool, MigrationError>;
    /// Discards the pages that were copied ahead. Returns their number.
    fn drop_ahead(&self) -> u64;
    /// Whether these pages fit, beyond the pages copied ahead.
    fn has_room(&self, pages: &DirtyBitmaps) -> bool;
    /// Stages a checkpoint: the present content of `pages`, and the pages that were copied
    /// [ahead](Self::stage_ahead).
    ///
    /// The guest is paused. The pages are copied when this call returns, or after the guest
    /// [resumed](Self::go_on). The checkpoint then waits until it is sent.
    ///
    /// # Errors
    /// [`MigrationError::Internal`] if there is no room.
    fn stage(&self, pages: &DirtyBitmaps) -> Result<(), MigrationError>;
    /// Prepares for the next checkpoint while the guest runs: copies the last one's rest.
    ///
    /// `holds_writes`: the VM reports that its guest's writes can be blocked. Returns a message for the operator,
    /// only once.
    fn prepare(&self, holds_writes: bool) -> Option<String>;
    /// The guest resumes: starts to copy staged pages that are not copied yet.
    fn go_on(&self);
    /// Ends staging after the last checkpoint: copies all remaining pages and unblocks the guest's writes.
    fn end(&self);
    /// Makes lanes read the oldest checkpoint that waits.
    ///
    /// # Errors
    /// [`MigrationError::Internal`] if no checkpoint waits.
    fn send_next(&self) -> Result<(), MigrationError>;
    /// Makes lanes read guest RAM again. Checkpoints that wait are kept.
    fn clear(&self);
}
