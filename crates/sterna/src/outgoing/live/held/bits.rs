//! Runs of pages in bitmaps.

use sterna_ram::DirtyBitmaps;

use crate::order::PageRun;

/// The runs of set bits, in order.
pub(in crate::outgoing::live) fn runs_of(pages: &DirtyBitmaps) -> impl Iterator<Item = PageRun> + '_ {
    pages.blocks().iter().enumerate().flat_map(|(block, bits)| {
        let mut from = 0;
        std::iter::from_fn(move || {
            let run = bits.next_run(from, bits.pages(), u64::MAX)?;
            from = run.end();
            Some(PageRun { block, first: run.first, count: run.count })
        })
    })
}

/// Joins neighbouring runs with at most `gap` pages between them.
pub(super) fn gathered(runs: Vec<PageRun>, gap: u64) -> Vec<PageRun> {
    let mut joined: Vec<PageRun> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.block == run.block && run.first - last.end() <= gap => {
                last.count = run.end() - last.first;
            }
            _ => joined.push(run),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_runs_of_one_block_are_joined() {
        let run = |block, first, count| PageRun { block, first, count };
        let runs = vec![run(0, 0, 2), run(0, 5, 1), run(0, 10, 1), run(1, 11, 4)];
        assert_eq!(gathered(runs, 3), [run(0, 0, 6), run(0, 10, 1), run(1, 11, 4)]);
    }
}
