//! Finds the pages of an image that have data.
//!
//! The sources are the bitmaps of a mapped-ram image, or the records of a legacy stream.

use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::spool;
use crate::ImageError;
use crate::model::Shape;
use crate::read::Image;
use crate::read::visitor::PageVisitor;

/// The pages of one block that the image contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCoverage {
    /// Pages in the block.
    pub pages: u64,
    /// One bit for each page that the image contains; all pages for a mapped-ram image.
    pub came: Vec<u64>,
    /// One bit for each page whose last content is data.
    pub data: Vec<u64>,
}

impl BlockCoverage {
    fn new(length_bytes: u64) -> Self {
        let pages = length_bytes >> PAGE_SHIFT;
        // The kernel zeroes this memory when it is used. A length that a stream only announces costs no memory. The
        // limit is 1 GiB for each bitmap, for all blocks together, if all pages of 32 TiB are present.
        let words = || vec![0; pages.div_ceil(64) as usize];
        Self { pages, came: words(), data: words() }
    }

    /// Number of pages that the image contains.
    pub fn came_pages(&self) -> u64 {
        ones(&self.came)
    }

    /// Number of pages with data.
    pub fn data_pages(&self) -> u64 {
        ones(&self.data)
    }

    /// The first page that the image does not contain.
    pub fn first_missing(&self) -> Option<u64> {
        (0..self.pages).find(|page| self.came[(page / 64) as usize] >> (page % 64) & 1 == 0)
    }

    /// Number of pages with data in `[first, end)`.
    pub fn data_in(&self, first: u64, end: u64) -> u64 {
        let end = end.min(self.pages);
        let mut count = 0;
        let mut at = first;
        while at < end {
            let stop = ((at / 64 + 1) * 64).min(end);
            let word = self.data[(at / 64) as usize] >> (at % 64);
            let width = stop - at;
            let mask = if width == 64 { u64::MAX } else { (1 << width) - 1 };
            count += u64::from((word & mask).count_ones());
            at = stop;
        }
        count
    }
}

/// The pages of all blocks that the image contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// One entry for each block, in the order of the shape.
    pub blocks: Vec<BlockCoverage>,
}

impl Coverage {
    /// Determines the coverage of `image`.
    ///
    /// The bitmaps of a mapped-ram image are already in memory. A legacy stream is read to its end. If it contains
    /// deltas (XBZRLE), it is first copied into a temporary file.
    ///
    /// # Errors
    /// The errors of [`Image::visit_pages`] and [`Image::spool`].
    pub fn of(image: &Image) -> Result<Self, ImageError> {
        if image.has_deltas() {
            return Self::of(&image.spool(&spool::default_directory())?);
        }
        let mut coverage = Self::empty(image.shape());
        let Some(mapped) = image.mapped() else {
            image.visit_pages(&mut coverage)?;
            return Ok(coverage);
        };
        for (block, mapped) in coverage.blocks.iter_mut().zip(mapped.blocks()) {
            for (word, bits) in block.data.iter_mut().zip(mapped.bitmap.words()) {
                *word = bits.load(std::sync::atomic::Ordering::Relaxed);
            }
            if !mapped.is_skipped {
                for page in (0..block.pages).step_by(64) {
                    let width = (block.pages - page).min(64);
                    block.came[(page / 64) as usize] = u64::MAX >> (64 - width);
                }
            }
        }
        Ok(coverage)
    }

    /// A coverage without any page.
    pub fn empty(shape: &Shape) -> Self {
        Self { blocks: shape.ram.blocks.iter().map(|block| BlockCoverage::new(block.length_bytes)).collect() }
    }
}

impl PageVisitor for Coverage {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        let block = &mut self.blocks[block];
        for page in first..first + (content.len() / PAGE_SIZE) as u64 {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            block.came[word] |= bit;
            block.data[word] |= bit;
        }
        Ok(())
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        let block = &mut self.blocks[block];
        for page in first..first + count {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            block.came[word] |= bit;
            block.data[word] &= !bit;
        }
        Ok(())
    }
}

fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_last_record_of_a_page_counts() {
        let mut coverage = Coverage { blocks: vec![BlockCoverage::new(200 * 4096)] };

        coverage.pages(0, 60, &vec![1; 10 * PAGE_SIZE]).unwrap();
        coverage.zero(0, 62, 3).unwrap();

        let block = &coverage.blocks[0];
        assert_eq!((block.came_pages(), block.data_pages(), block.first_missing()), (10, 7, Some(0)));
        assert_eq!(block.data_in(0, 62), 2);
        assert_eq!(block.data_in(61, 67), 3);
        assert_eq!(block.data_in(0, 1000), 7);
    }
}
