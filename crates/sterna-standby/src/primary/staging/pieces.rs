//! Places of a checkpoint's pages in the staging memory.

use sterna::internals::PageRun;
use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

/// A run of pages and its place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) run: PageRun,
    pub(super) at: u64,
}

impl Piece {
    /// The part of this piece that begins with page `first` of the block.
    fn part(&self, first: u64, count: u64) -> Self {
        Self { run: PageRun { first, count, ..self.run }, at: self.at + first - self.run.first }
    }
}

/// The runs of the dirty pages in `pages`, ordered by block and page.
pub(super) fn runs_of(pages: &DirtyBitmaps) -> Vec<PageRun> {
    let mut runs = Vec::new();
    for (block, bits) in pages.blocks().iter().enumerate() {
        let mut from = 0;
        while let Some(found) = bits.next_run(from, bits.pages(), u64::MAX) {
            let run = PageRun { block, first: found.first, count: found.count };
            runs.push(run);
            from = run.end();
        }
    }
    runs
}

/// Assigns adjacent places to `runs`, beginning at page `start` of the arena.
pub(super) fn laid(runs: &[PageRun], start: u64) -> Vec<Piece> {
    let mut at = start;
    let place = |run: &PageRun| {
        let piece = Piece { run: *run, at };
        at += run.count;
        piece
    };
    runs.iter().map(place).collect()
}

/// Splits `runs` into pages that have a place in `pieces` and pages that have none.
///
/// All lists are ordered by block and page.
pub(super) fn split(pieces: &[Piece], runs: &[PageRun]) -> (Vec<Piece>, Vec<PageRun>) {
    let (mut placed, mut others) = (Vec::new(), Vec::new());
    for run in runs {
        let (mut first, end) = (run.first, run.end());
        let before = |piece: &Piece| (piece.run.block, piece.run.end()) <= (run.block, run.first);
        let from = pieces.partition_point(before);
        let near = pieces[from..].iter().take_while(|piece| piece.run.block == run.block);
        for piece in near.take_while(|piece| piece.run.first < end) {
            if first < piece.run.first {
                others.push(PageRun { first, count: piece.run.first - first, ..*run });
                first = piece.run.first;
            }
            let until = end.min(piece.run.end());
            placed.push(piece.part(first, until - first));
            first = until;
        }
        if first < end {
            others.push(PageRun { first, count: end - first, ..*run });
        }
    }
    (placed, others)
}

/// Both lists of pieces in one list, ordered by block and page. No page may be in two pieces.
pub(super) fn merged(one: &[Piece], other: &[Piece]) -> Vec<Piece> {
    let mut all = [one, other].concat();
    all.sort_by_key(|piece| (piece.run.block, piece.run.first));
    all
}

/// The place of the first page of `run`, and how many pages are adjacent there.
///
/// `None` if no piece contains the first page.
pub(super) fn place_of(pieces: &[Piece], run: PageRun) -> Option<(u64, u64)> {
    let after = pieces.partition_point(|piece| (piece.run.block, piece.run.first) <= (run.block, run.first));
    let piece = pieces[after.checked_sub(1)?];
    let is_inside = piece.run.block == run.block && run.first < piece.run.end();
    is_inside.then(|| (piece.at + run.first - piece.run.first, run.end().min(piece.run.end()) - run.first))
}

/// The number of pages in `pieces`.
pub(super) fn count<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> u64 {
    pieces.into_iter().map(|piece| piece.run.count).sum()
}

/// The size of `pages` pages in bytes.
pub(super) fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(block: usize, first: u64, count: u64) -> PageRun {
        PageRun { block, first, count }
    }

    #[test]
    fn runs_are_split_where_pieces_begin_and_end() {
        let pieces = laid(&[run(0, 10, 5), run(0, 20, 5), run(2, 0, 4)], 100);
        let runs = [run(0, 0, 3), run(0, 8, 14), run(0, 24, 1), run(1, 10, 3), run(2, 1, 9)];

        let (placed, others) = split(&pieces, &runs);

        let at = |block, first, count, at| Piece { run: run(block, first, count), at };
        assert_eq!(placed, [at(0, 10, 5, 100), at(0, 20, 2, 105), at(0, 24, 1, 109), at(2, 1, 3, 111)]);
        assert_eq!(others, [run(0, 0, 3), run(0, 8, 2), run(0, 15, 5), run(1, 10, 3), run(2, 4, 6)]);
        assert_eq!(count(&placed) + count(&laid(&others, 0)), 3 + 14 + 1 + 3 + 9);
        assert_eq!(split(&[], &runs), (vec![], runs.to_vec()));
    }

    #[test]
    fn pages_are_found_as_far_as_they_are_neighbours() {
        let pieces =
            merged(&laid(&[run(0, 10, 5), run(1, 0, 2)], 0), &laid(&[run(0, 15, 2), run(0, 3, 1)], 50));
        assert_eq!(place_of(&pieces, run(0, 11, 6)), Some((1, 4)));
        assert_eq!(place_of(&pieces, run(0, 15, 6)), Some((50, 2)));
        assert_eq!(place_of(&pieces, run(0, 3, 1)), Some((52, 1)));
        assert_eq!(place_of(&pieces, run(0, 17, 1)), None);
        assert_eq!(place_of(&pieces, run(1, 1, 1)), Some((6, 1)));
        assert_eq!(place_of(&[], run(0, 0, 1)), None);
    }
}
