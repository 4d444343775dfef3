//! Joins runs of pages into long ranges: ranges of data, and ranges of zeros.

use sterna_wire::rdma::BlockRange;

/// The longest run of zeros between data that is written as data to a QEMU.
///
/// A QEMU accepts one range per message, and the READY for the next message takes about 50 µs. In that time an
/// adapter with 10 Gbit/s writes 64 KiB. A faster adapter would gain by a larger value, and loses little with
/// this one.
pub(super) const SHORT_ZEROS: u64 = 64 << 10;
/// Data are passed on when they have this size.
const LONG_DATA: u64 = 2 << 20;

/// Zeros are passed on at this size, to limit the destination's time per command.
///
/// The time must stay below the limit of a wait.
const LONG_ZEROS: u64 = 1 << 30;

/// Ranges that are passed on, each kind in the order of memory.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    pub(super) data: Vec<BlockRange>,
    /// Zero ranges. Their absent pages must not be read.
    pub(super) zeros: Vec<Zeros>,
}

/// A range of zero pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Zeros {
    pub(super) range: BlockRange,
    /// Whether the range contains pages that were never populated.
    pub(super) is_absent: bool,
}

/// Joins adjacent runs into ranges.
#[derive(Debug)]
pub(super) struct Gather {
    /// The longest run of zeros between data that becomes data, in bytes.
    short_zeros: u64,
    data: Option<BlockRange>,
    /// Zeros that follow the data.
    zeros: Option<Zeros>,
}

impl Gather {
    /// Joins runs. Zeros between data become data up to `short_zeros` bytes.
    pub(super) fn new(short_zeros: u64) -> Self {
        Self { short_zeros, data: None, zeros: None }
    }

    /// Adds a run of pages with content.
    pub(super) fn data(&mut self, range: BlockRange, to: &mut Ranges) {
        if let Some(zeros) = self.zeros {
            let is_short = !zeros.is_absent && zeros.range.length <= self.short_zeros;
            match &mut self.data {
                Some(data) if is_short && meets(data, &zeros.range) && meets(&zeros.range, &range) => {
                    data.length += zeros.range.length;
                    self.zeros = None;
                }
                _ => self.flush(to),
            }
        }
        match &mut self.data {
            Some(data) if meets(data, &range) => data.length += range.length,
            _ => to.data.extend(self.data.replace(range)),
        }
        if self.data.is_some_and(|data| data.length >= LONG_DATA) {
            to.data.extend(self.data.take());
        }
    }

    /// Adds a run of zero pages.
    pub(super) fn zeros(&mut self, range: BlockRange, is_absent: bool, to: &mut Ranges) {
        match &mut self.zeros {
            Some(zeros) if meets(&zeros.range, &range) => {
                zeros.range.length += range.length;
                zeros.is_absent |= is_absent;
            }
            _ => {
                to.zeros.extend(self.zeros.replace(Zeros { range, is_absent }));
                if !self.data.is_some_and(|data| meets(&data, &range)) {
                    to.data.extend(self.data.take());
                }
            }
        }
        if self.zeros.is_some_and(|zeros| zeros.range.length > self.short_zeros) {
            to.data.extend(self.data.take());
        }
        if self.zeros.is_some_and(|zeros| zeros.range.length >= LONG_ZEROS) {
            to.zeros.extend(self.zeros.take());
        }
    }

    /// Passes on all ranges.
    pub(super) fn flush(&mut self, to: &mut Ranges) {
        to.data.extend(self.data.take());
        to.zeros.extend(self.zeros.take());
    }
}

/// Whether `next` begins at the end of `range`.
fn meets(range: &BlockRange, next: &BlockRange) -> bool {
    range.block == next.block && range.end() == next.start
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn pages(first: u64, count: u64) -> BlockRange {
        BlockRange { block: 0, start: first * PAGE, length: count * PAGE }
    }

    /// The ranges that result from runs of `(pages, first, kind)`.
    fn gathered(short: u64, runs: &[(u64, u64, char)]) -> Ranges {
        let (mut gather, mut ranges) = (Gather::new(short * PAGE), Ranges::default());
        for (first, count, what) in runs {
            match what {
                'd' => gather.data(pages(*first, *count), &mut ranges),
                'z' => gather.zeros(pages(*first, *count), false, &mut ranges),
                _ => gather.zeros(pages(*first, *count), true, &mut ranges),
            }
        }
        gather.flush(&mut ranges);
        ranges
    }

    fn zeros(first: u64, count: u64) -> Zeros {
        Zeros { range: pages(first, count), is_absent: false }
    }

    #[test]
    fn neighbours_become_one_range() {
        let ranges = gathered(0, &[(0, 2, 'd'), (2, 3, 'd'), (5, 1, 'z'), (6, 100, 'z'), (200, 1, 'd')]);

        assert_eq!(ranges.data, [pages(0, 5), pages(200, 1)]);
        assert_eq!(ranges.zeros, [zeros(5, 101)]);
    }

    #[test]
    fn short_zeros_between_data_become_data_and_others_do_not() {
        let alternating = [(0, 1, 'd'), (1, 4, 'z'), (5, 1, 'd'), (6, 5, 'z'), (11, 1, 'd')];
        let ranges = gathered(4, &alternating);
        assert_eq!((ranges.data, ranges.zeros), (vec![pages(0, 6), pages(11, 1)], vec![zeros(6, 5)]));

        let ranges = gathered(0, &alternating);
        assert_eq!(ranges.data, [pages(0, 1), pages(5, 1), pages(11, 1)]);
        assert_eq!(ranges.zeros, [zeros(1, 4), zeros(6, 5)]);

        let apart = [(0, 1, 'd'), (2, 1, 'z'), (3, 1, 'd'), (4, 1, 'z'), (6, 1, 'd')];
        let ranges = gathered(4, &apart);
        assert_eq!(ranges.data, [pages(0, 1), pages(3, 1), pages(6, 1)]);
        assert_eq!(ranges.zeros, [zeros(2, 1), zeros(4, 1)]);
    }

    #[test]
    fn absent_pages_are_never_written() {
        let ranges =
            gathered(4, &[(0, 1, 'd'), (1, 1, 'a'), (2, 1, 'd'), (3, 1, 'z'), (4, 1, 'a'), (5, 1, 'd')]);

        assert_eq!(ranges.data, [pages(0, 1), pages(2, 1), pages(5, 1)]);
        let absent = |first, count| Zeros { range: pages(first, count), is_absent: true };
        assert_eq!(ranges.zeros, [absent(1, 1), absent(3, 2)]);
    }

    #[test]
    fn every_page_comes_out_once() {
        let mut rng = sterna_testing::random("every_page_comes_out_once");
        for _ in 0..200 {
            let (mut first, mut runs, mut expected) = (0, Vec::new(), Vec::new());
            for _ in 0..100 {
                first += rng.u64(0..2) * rng.u64(0..4);
                let count = rng.u64(1..20);
                let what = *rng.choice(&['d', 'z', 'a']).unwrap();
                runs.push((first, count, what));
                expected.extend(first..first + count);
                first += count;
            }
            let ranges = gathered(rng.u64(0..12), &runs);
            let all = ranges.data.iter().copied().chain(ranges.zeros.iter().map(|zeros| zeros.range));
            let mut came: Vec<u64> = all.flat_map(|range| range.start / PAGE..range.end() / PAGE).collect();
            came.sort_unstable();
            assert_eq!(came, expected);
        }
    }
}
