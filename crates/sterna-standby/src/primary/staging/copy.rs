//! Copies pages to their places in the staging memory, with several threads.

use sterna::error::MigrationError;
use sterna::internals::threads::{copied_in_parts, in_part};
use sterna_ram::{GuestRam, PAGE_SIZE, RamBlock};

use super::pieces::{Piece, bytes, count};

/// Copies all pieces to their places.
pub(super) fn copy_all((ram, arena): (&GuestRam, &RamBlock), pieces: &[Piece]) -> Result<(), MigrationError> {
    copied_in_parts(count(pieces), |pages| copy_part((ram, arena), pieces, pages))
}

/// Copies a range of the pieces' pages, counted from their first page.
fn copy_part(
    (ram, arena): (&GuestRam, &RamBlock),
    pieces: &[Piece],
    pages: std::ops::Range<u64>,
) -> Result<(), MigrationError> {
    for (piece, skip, count) in in_part(pieces, pages, |piece| piece.run.count) {
        let length = count as usize * PAGE_SIZE;
        let from = ram.block(piece.run.block).slice(bytes(piece.run.first + skip), length)?;
        from.copy_to_window(&arena.slice(bytes(piece.at + skip), length)?)?;
    }
    Ok(())
}
