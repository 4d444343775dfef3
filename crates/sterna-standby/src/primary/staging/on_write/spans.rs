//! Spans: runs of pages that one call protects. Grains: the parts of a span that are copied and unblocked
//! together.

use sterna::internals::PageRun;

use super::super::pieces::Piece;
use super::cost::Runs;

/// The largest number of pages that are copied and unblocked together.
///
/// The number is small, so that a blocked writer waits little longer than for one page. It is large enough that a
/// guest that writes consecutive pages does not block at each page.
const GRAIN_PAGES: u64 = 32;

/// Spans over all `pieces`. A span includes clean pages between two pieces if there are at most `gap`.
pub(super) fn spans(pieces: impl Iterator<Item = Piece>, gap: u64) -> Vec<PageRun> {
    let mut spans: Vec<PageRun> = Vec::new();
    for Piece { run, .. } in pieces {
        match spans.last_mut() {
            Some(last) if last.block == run.block && run.first - last.end() <= gap => {
                last.count = run.end() - last.first;
            }
            _ => spans.push(run),
        }
    }
    spans
}

/// The number of protecting calls and of pages in these spans.
pub(super) fn extent(spans: &[PageRun]) -> Runs {
    Runs { calls: spans.len() as u64, pages: spans.iter().map(|span| span.count).sum() }
}

/// Splits spans into grains, in order.
pub(super) fn grains(spans: &[PageRun]) -> Vec<PageRun> {
    let mut grains = Vec::new();
    for span in spans {
        let mut rest = Some(*span);
        while let Some(run) = rest {
            let (grain, others) = run.split(GRAIN_PAGES);
            grains.push(grain);
            rest = others;
        }
    }
    grains
}

/// The index of the grain that contains this page.
pub(super) fn grain_of(grains: &[PageRun], block: usize, page: u64) -> Option<usize> {
    let after = grains.partition_point(|grain| (grain.block, grain.first) <= (block, page));
    let index = after.checked_sub(1)?;
    (grains[index].block == block && page < grains[index].end()).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(block: usize, first: u64, count: u64) -> PageRun {
        PageRun { block, first, count }
    }

    #[test]
    fn near_runs_of_a_block_are_one_span() {
        let runs = [run(0, 0, 5), run(0, 8, 1), run(0, 13, 2), run(1, 16, 100), run(1, 117, 1)];
        let spans = spans(runs.map(|run| Piece { run, at: 0 }).into_iter(), 3);
        assert_eq!(spans, [run(0, 0, 9), run(0, 13, 2), run(1, 16, 102)]);
        assert_eq!(extent(&spans), Runs { calls: 3, pages: 113 });
    }

    #[test]
    fn every_page_of_a_span_is_in_one_grain() {
        let spans = [run(0, 3, 40), run(0, 50, 1), run(2, 0, 64)];
        let grains = grains(&spans);
        for (block, page) in (0..3).flat_map(|block| (0..70).map(move |page| (block, page))) {
            let is_in = |run: &PageRun| run.block == block && (run.first..run.end()).contains(&page);
            let found = grain_of(&grains, block, page);
            assert_eq!(found.is_some(), spans.iter().any(is_in), "{block}, {page}");
            assert!(found.is_none_or(|index| is_in(&grains[index])));
        }
        assert_eq!(grains.iter().map(|grain| grain.count).sum::<u64>(), 105);
    }
}
