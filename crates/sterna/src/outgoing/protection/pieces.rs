//! Where the pages of a checkpoint lie in the staging memory.

use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use crate::order::PageRun;

/// A run of pages and its place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) run: PageRun,
    pub(super) at: u64,
}

/// The runs of these pages, ordered by block and page, side by side from `start` on.
pub(super) fn pieces_of(pages: &DirtyBitmaps, start: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = start;
    for (block, bits) in pages.blocks().iter().enumerate() {
        let mut from = 0;
        while let Some(found) = bits.next_run(from, bits.pages(), u64::MAX) {
            let run = PageRun { block, first: found.first, count: found.count };
            pieces.push(Piece { run, at });
            at += run.count;
            from = run.end();
        }
    }
    pieces
}

/// The place of `run` if all of it is in one of the pieces.
pub(super) fn place_of(pieces: &[Piece], run: PageRun) -> Option<u64> {
    let after = pieces.partition_point(|piece| (piece.run.block, piece.run.first) <= (run.block, run.first));
    let piece = pieces[after.checked_sub(1)?];
    let is_inside = piece.run.block == run.block && run.end() <= piece.run.end();
    is_inside.then(|| piece.at + run.first - piece.run.first)
}

/// How many bytes so many pages have.
pub(super) fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}
