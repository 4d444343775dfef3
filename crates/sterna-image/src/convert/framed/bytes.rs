//! Bytes of a file that are no pages, in an image in Sterna's own format.

use sterna_store::{ImageWriter, Piece, Recipe};
use sterna_wire::PAGE_SIZE;

/// Runs of zeros of this length in a file's other bytes become holes.
const HOLE: usize = PAGE_SIZE;
/// Appends bytes to a recipe. Long runs of zeros become holes.
pub(in crate::convert) fn push_bytes(writer: &ImageWriter, recipe: &mut Recipe, bytes: &[u8]) {
    for part in bytes.chunks(HOLE) {
        match part.len() == HOLE && part.iter().all(|byte| *byte == 0) {
            true => recipe.push(Piece::Hole { length: part.len() as u64 }),
            false => recipe.push(writer.bytes(part)),
        }
    }
}
