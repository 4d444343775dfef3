//! The log of written pages.

use rustix::io::Errno;

use crate::vfio_user::wire::DmaLogRange;

/// Highest number of logged pages: 4 TiB of guest RAM in pages of 4 KiB.
const MOST_PAGES: u64 = 1 << 30;

/// One bit per page of the logged ranges.
pub(super) struct Log {
    page_size: u64,
    ranges: Vec<(DmaLogRange, Vec<u64>)>,
}

impl Log {
    pub(super) fn new(page_size: u64, ranges: &[DmaLogRange]) -> Result<Self, Errno> {
        let mut sorted = ranges.to_vec();
        sorted.sort_by_key(|range| range.address);
        if sorted.windows(2).any(|pair| pair[0].address + pair[0].length > pair[1].address) {
            return Err(Errno::INVAL);
        }
        let pages = sorted.iter().map(|range| range.length / page_size).fold(0, u64::saturating_add);
        if pages > MOST_PAGES {
            return Err(Errno::NOMEM);
        }
        let words = |range: &DmaLogRange| (range.length / page_size).div_ceil(64) as usize;
        let ranges = sorted.into_iter().map(|range| (range, vec![0; words(&range)])).collect();
        Ok(Self { page_size, ranges })
    }

    pub(super) fn set(&mut self, address: u64) {
        let inside = |range: &DmaLogRange| address >= range.address && address - range.address < range.length;
        if let Some((range, words)) = self.ranges.iter_mut().find(|(range, _)| inside(range)) {
            let page = (address - range.address) / self.page_size;
            words[(page / 64) as usize] |= 1 << (page % 64);
        }
    }

    /// Moves the bits of `range`, which must be inside one logged range.
    pub(super) fn take(
        &mut self,
        range: DmaLogRange,
        page_size: u64,
        bitmap: &mut [u64],
    ) -> Result<(), Errno> {
        let end = range.address.checked_add(range.length).ok_or(Errno::INVAL)?;
        let inside = |known: &DmaLogRange| {
            range.address >= known.address && end <= known.address.saturating_add(known.length)
        };
        if page_size != self.page_size {
            return Err(Errno::INVAL);
        }
        let (known, words) = self.ranges.iter_mut().find(|(known, _)| inside(known)).ok_or(Errno::INVAL)?;
        let first = (range.address - known.address) / page_size;
        for page in 0..range.length / page_size {
            let from = first + page;
            let (word, bit) = (&mut words[(from / 64) as usize], 1 << (from % 64));
            if *word & bit != 0 {
                *word &= !bit;
                let to = bitmap.get_mut((page / 64) as usize).ok_or(Errno::INVAL)?;
                *to |= 1 << (page % 64);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn range(first: u64, pages: u64) -> DmaLogRange {
        DmaLogRange { address: first * PAGE, length: pages * PAGE }
    }

    #[test]
    fn take_moves_the_bits_of_its_range_once() {
        let mut log = Log::new(PAGE, &[range(1000, 200), range(10, 100)]).unwrap();
        [10, 12, 109, 1000, 1199, 5000].iter().for_each(|page| log.set(page * PAGE));

        let mut bitmap = [0; 2];
        log.take(range(12, 98), PAGE, &mut bitmap).unwrap();
        assert_eq!(bitmap, [1, 1 << 33]);
        bitmap = [0; 2];
        log.take(range(10, 100), PAGE, &mut bitmap).unwrap();
        assert_eq!(bitmap, [1, 0], "only what was not taken before");
        let mut bitmap = [0; 4];
        log.take(range(1000, 200), PAGE, &mut bitmap).unwrap();
        assert_eq!(bitmap, [1, 0, 0, 1 << 7]);
    }

    #[test]
    fn take_of_what_is_not_logged_is_refused() {
        let mut log = Log::new(PAGE, &[range(10, 100)]).unwrap();
        assert!(log.take(range(9, 2), PAGE, &mut [0]).is_err());
        assert!(log.take(range(100, 11), PAGE, &mut [0]).is_err());
        assert!(log.take(range(10, 100), 2 * PAGE, &mut [0; 2]).is_err());
        assert!(Log::new(PAGE, &[range(10, 100), range(109, 2)]).is_err());
    }
}
