//! The table of a block's extents (`specs/image.md §5`): one entry of a fixed length for each extent.

use super::bytes::Rule;
use super::limits::PAGE_BYTES;

/// No frame: the image holds no page of the extent.
pub(crate) const NO_FRAME: u32 = u32::MAX;

/// One extent of a block: the frame that holds its pages, and which pages these are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Extent<'a> {
    /// Number of the frame; [`NO_FRAME`] if no page is held.
    pub(crate) frame: u32,
    held: &'a [u8],
    zero: &'a [u8],
}

impl Extent<'_> {
    /// Whether the frame holds page `page` of the extent.
    pub(crate) fn holds(&self, page: usize) -> bool {
        self.held[page / 8] >> (page % 8) & 1 == 1
    }

    /// Whether the page comes from the base. Without a base, such a page is zero.
    pub(crate) fn is_of_base(&self, page: usize) -> bool {
        !self.holds(page) && self.zero.get(page / 8).is_some_and(|byte| byte >> (page % 8) & 1 == 0)
    }

    /// Whether the entry says nothing about any page: all of them are zero, or in a layer the base's.
    pub(crate) fn is_empty(&self) -> bool {
        self.frame == NO_FRAME && self.zero.iter().all(|byte| *byte == 0)
    }

    /// Number of held pages before `page`: the page's position in the frame.
    pub(crate) fn rank(&self, page: usize) -> usize {
        let whole: u32 = self.held[..page / 8].iter().map(|byte| byte.count_ones()).sum();
        let part =
            self.held.get(page / 8).map_or(0, |byte| (byte & ((1u16 << (page % 8)) - 1) as u8).count_ones());
        (whole + part) as usize
    }

    /// Number of held pages.
    pub(crate) fn count(&self) -> usize {
        self.rank(self.held.len() * 8)
    }

    /// Checks an entry with `pages` pages. Returns what is wrong with it.
    fn check(&self, pages: usize, frame_pages: impl Fn(u32) -> Option<u16>) -> Result<(), String> {
        let (frame, count) = (self.frame, self.count());
        if frame == NO_FRAME {
            if count > 0 {
                return Err(format!("has {count} pages, but no frame"));
            }
        } else {
            let Some(held) = frame_pages(frame) else {
                return Err(format!("names frame {frame}, which does not exist"));
            };
            if usize::from(held) != count || count == 0 {
                return Err(format!("has {count} pages, but frame {frame} has {held}"));
            }
        }
        for page in 0..self.held.len() * 8 {
            let is_zero = self.zero.get(page / 8).is_some_and(|byte| byte >> (page % 8) & 1 == 1);
            if page >= pages && (self.holds(page) || is_zero) {
                return Err("has a page after the end of its block".to_owned());
            }
            if self.holds(page) && is_zero {
                return Err(format!("holds page {page} and calls it zero"));
            }
        }
        Ok(())
    }
}

/// The extents of one block, as they are in the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExtentTable {
    bytes: Vec<u8>,
    mask_bytes: usize,
    is_layer: bool,
}

impl ExtentTable {
    /// Makes a table without any page: all pages are zero, or in a layer the base's.
    pub(crate) fn new(extents: u64, extent_bytes: u32, is_layer: bool) -> Self {
        let mut table = Self::of(Vec::new(), extent_bytes, is_layer);
        // Zeros take no memory before they are written.
        table.bytes = vec![0; extents as usize * table.entry_bytes()];
        table
    }

    /// Takes the bytes of a table with `extents` entries.
    pub(crate) fn decode(bytes: &[u8], extent_bytes: u32, is_layer: bool) -> Self {
        Self::of(bytes.to_vec(), extent_bytes, is_layer)
    }

    /// Bytes of one entry: the frame, the held pages, and in a layer the zero pages.
    pub(crate) fn entry_bytes_of(extent_bytes: u32, is_layer: bool) -> usize {
        Self::of(Vec::new(), extent_bytes, is_layer).entry_bytes()
    }

    fn of(bytes: Vec<u8>, extent_bytes: u32, is_layer: bool) -> Self {
        Self { bytes, mask_bytes: extent_bytes as usize / PAGE_BYTES / 8, is_layer }
    }

    fn entry_bytes(&self) -> usize {
        4 + self.mask_bytes * if self.is_layer { 2 } else { 1 }
    }

    fn at(&self, extent: u64) -> usize {
        extent as usize * self.entry_bytes()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn extents(&self) -> u64 {
        (self.bytes.len() / self.entry_bytes()) as u64
    }

    pub(crate) fn get(&self, extent: u64) -> Extent<'_> {
        let entry = &self.bytes[self.at(extent)..][..self.entry_bytes()];
        let (frame, masks) = entry.split_at(4);
        let (held, zero) = masks.split_at(self.mask_bytes);
        // The number is one larger in the index, so that an extent without a frame is all zeros.
        let frame = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]).wrapping_sub(1);
        Extent { frame, held, zero }
    }

    /// Number of held pages of all extents.
    pub(crate) fn held_pages(&self) -> u64 {
        (0..self.extents()).map(|extent| self.get(extent).count() as u64).sum()
    }

    /// Sets an extent. `zero` counts only in a layer.
    pub(crate) fn set(&mut self, extent: u64, frame: u32, held: &[u8], zero: &[u8]) {
        let (at, mask_bytes, is_layer) = (self.at(extent), self.mask_bytes, self.is_layer);
        let entry_bytes = self.entry_bytes();
        let entry = &mut self.bytes[at..at + entry_bytes];
        entry[..4].copy_from_slice(&frame.wrapping_add(1).to_le_bytes());
        entry[4..4 + mask_bytes].copy_from_slice(&held[..mask_bytes]);
        if is_layer {
            entry[4 + mask_bytes..].copy_from_slice(&zero[..mask_bytes]);
        }
    }

    /// Replaces the frame of an extent.
    pub(crate) fn set_frame(&mut self, extent: u64, frame: u32) {
        let at = self.at(extent);
        self.bytes[at..at + 4].copy_from_slice(&frame.wrapping_add(1).to_le_bytes());
    }

    /// Checks the entry of an extent with `pages` pages; `frame_pages` gives the number of pages of a frame.
    pub(crate) fn check(
        &self,
        extent: u64,
        pages: usize,
        frame_pages: impl Fn(u32) -> Option<u16>,
    ) -> Result<(), Rule> {
        let entry = self.get(extent);
        // Most entries of a large guest say nothing. A guest waits for this check before it starts.
        if entry.is_empty() && entry.held.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        entry.check(pages, frame_pages).map_err(|rule| (format!("extent {extent} {rule}"), "§5"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_of_an_extent_is_held_zero_or_of_the_base() {
        let mut table = ExtentTable::new(2, 64 << 10, true);
        table.set(1, 7, &[0b1010_0000, 0b1], &[0b1, 0]);
        let extent = table.get(1);

        assert_eq!((extent.frame, extent.count()), (7, 3));
        assert_eq!((extent.rank(5), extent.rank(7), extent.rank(8)), (0, 1, 2));
        assert!(extent.holds(8) && !extent.is_of_base(8));
        assert!(!extent.holds(0) && !extent.is_of_base(0));
        assert!(extent.is_of_base(1));
        assert_eq!(table.get(0).frame, NO_FRAME);
        assert_eq!(table.check(1, 16, |_| Some(3)), Ok(()));
        assert!(table.check(1, 8, |_| Some(3)).is_err(), "a page after the end");
        assert!(table.check(1, 16, |_| Some(2)).is_err(), "another count");
        assert!(table.check(1, 16, |_| None).is_err(), "no frame");
        table.set(1, 7, &[1, 0], &[1, 0]);
        assert!(table.check(1, 16, |_| Some(1)).is_err(), "held and zero");
    }

    #[test]
    fn index_of_16_gib_is_at_most_a_thousandth_of_it_for_every_extent() {
        for shift in 16..=21 {
            let (extent_bytes, ram) = (1u32 << shift, 16u64 << 30);
            let entry = ExtentTable::entry_bytes_of(extent_bytes, true) + super::super::index::FRAME_BYTES;
            let index = ram / u64::from(extent_bytes) * entry as u64;
            // What else is in the index has a few kilobytes.
            assert!(index + (64 << 10) <= ram >> 10, "{extent_bytes}: {index}");
        }
    }
}
