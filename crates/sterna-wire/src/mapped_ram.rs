//! Layout of a file with the capability `mapped-ram` (`specs/mapped-ram.md`).
//!
//! In the block list, a [`MappedHeader`] follows each block's entry. It names the positions of a bitmap and of
//! the area for the block's pages. The bitmap marks the pages that the file contains. The next entry starts
//! after the area for the pages.

use crate::error::WireError;
use crate::reader;
use crate::{PAGE_SHIFT, PAGE_SIZE};

const MESSAGE: &str = "mapped-ram header";
const SPEC: &str = "specs/mapped-ram.md §4.2";

/// Version of the header.
pub const VERSION: u32 = 1;
/// Alignment of the start of the pages in files that QEMU writes, in bytes.
pub const PAGES_ALIGNMENT: u64 = 1 << 20;

/// The header after a block's entry (§4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedHeader {
    /// Offset of the bitmap from the start of the file, in bytes.
    pub bitmap_offset: u64,
    /// Offset of the block's page 0 from the start of the file, in bytes.
    pub pages_offset: u64,
}

impl MappedHeader {
    /// Length of the header in the file, in bytes.
    pub const BYTES: usize = 28;

    /// QEMU's layout of a block of `length_bytes` whose header is at `header_offset` (§4.3).
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when the file would be longer than 2^63 bytes.
    pub fn place(header_offset: u64, length_bytes: u64) -> Result<Self, WireError> {
        Self::place_aligned(header_offset, length_bytes, PAGES_ALIGNMENT)
    }

    /// Like [`place`](Self::place), with pages that start at a multiple of `alignment` bytes.
    ///
    /// QEMU accepts any multiple of the page size.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when the file would be longer than 2^63 bytes, or when `alignment`
    /// is not a multiple of the page size.
    pub fn place_aligned(header_offset: u64, length_bytes: u64, alignment: u64) -> Result<Self, WireError> {
        if alignment == 0 || !alignment.is_multiple_of(PAGE_SIZE as u64) {
            let rule = format!("pages aligned to {alignment} bytes, not a multiple of {PAGE_SIZE}");
            return Err(WireError::local(MESSAGE, 20, "specs/mapped-ram.md §4.3", rule));
        }
        let bitmap_offset = header_offset.checked_add(Self::BYTES as u64);
        let pages_offset = bitmap_offset
            .and_then(|at| at.checked_add(bitmap_bytes(length_bytes)))
            .and_then(|at| at.checked_next_multiple_of(alignment))
            .filter(|at| at.checked_add(length_bytes).is_some_and(|end| end <= i64::MAX as u64));
        match (bitmap_offset, pages_offset) {
            (Some(bitmap_offset), Some(pages_offset)) => Ok(Self { bitmap_offset, pages_offset }),
            _ => Err(WireError::local(MESSAGE, 0, SPEC, "the file would be longer than 2^63 bytes")),
        }
    }

    /// Appends the header as it is in the file.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&(PAGE_SIZE as u64).to_be_bytes());
        out.extend_from_slice(&self.bitmap_offset.to_be_bytes());
        out.extend_from_slice(&self.pages_offset.to_be_bytes());
    }

    /// Reads one header from the start of `buf`; `None` while bytes are missing.
    ///
    /// [`check`](Self::check) checks the offsets.
    ///
    /// # Errors
    /// A wrong version or page size; pages that do not start at a multiple of the page size.
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let version = r.u32()?;
            // QEMU accepts version 0, too (§6.5).
            if version > VERSION {
                return Err(r.unfit(SPEC, format!("version {version}, only {VERSION} is known")));
            }
            let page_size = r.u64()?;
            if page_size != PAGE_SIZE as u64 {
                return Err(r.unfit(SPEC, format!("pages of {page_size} bytes, not {PAGE_SIZE}")));
            }
            let bitmap_offset = r.u64()?;
            let pages_offset = r.u64()?;
            if pages_offset % PAGE_SIZE as u64 != 0 {
                return Err(r.bad(SPEC, format!("pages at {pages_offset:#x}, not a multiple of {PAGE_SIZE}")));
            }
            Ok(Self { bitmap_offset, pages_offset })
        })
    }

    /// Checks the offsets: header, bitmap and pages follow each other, below 2^63 bytes.
    ///
    /// `end_of_header` is the file offset of the byte after the header.
    ///
    /// # Errors
    /// [`Fault::PeerMisbehaved`](crate::Fault::PeerMisbehaved) when the order or the limit is violated.
    pub fn check(&self, end_of_header: u64, length_bytes: u64) -> Result<(), WireError> {
        let bad = |at, rule| Err(WireError::misbehaved(MESSAGE, at, SPEC, rule));
        if self.bitmap_offset < end_of_header {
            return bad(12, "the bitmap is before the end of its header");
        }
        let end_of_bitmap = self.bitmap_offset.checked_add(bitmap_bytes(length_bytes));
        if end_of_bitmap.is_none_or(|end| end > self.pages_offset) {
            return bad(20, "the pages are not after the bitmap");
        }
        if self.pages_offset.checked_add(length_bytes).is_none_or(|end| end > i64::MAX as u64) {
            return bad(20, "the pages end beyond 2^63 bytes");
        }
        Ok(())
    }

    /// Whether the file has no area for the block (`x-ignore-shared`, §4.8).
    pub fn is_skipped(&self) -> bool {
        self.bitmap_offset == 0 && self.pages_offset == 0
    }

    /// File offset of the byte after the block's pages, where the stream continues (§4.3).
    pub fn end_of_pages(&self, length_bytes: u64) -> u64 {
        self.pages_offset.saturating_add(length_bytes)
    }

    /// File offset of page `page` of the block.
    pub fn page_offset(&self, page: u64) -> u64 {
        self.pages_offset.saturating_add(page << PAGE_SHIFT)
    }
}

/// Length of a block's bitmap, in bytes: whole words of 64 pages (§4.3).
pub fn bitmap_bytes(length_bytes: u64) -> u64 {
    (length_bytes >> PAGE_SHIFT).div_ceil(64) * 8
}

/// Whether the file contains page `page`, by the bitmap of an x86 host (§4.5).
///
/// False for a page outside the bitmap.
pub fn holds_page(bitmap: &[u8], page: u64) -> bool {
    let byte = usize::try_from(page >> 3).ok().and_then(|at| bitmap.get(at));
    byte.is_some_and(|byte| byte >> (page & 7) & 1 == 1)
}

/// Marks page `page` as contained in the file. Ignores a page outside the bitmap.
pub fn mark_page(bitmap: &mut [u8], page: u64) {
    if let Some(byte) = usize::try_from(page >> 3).ok().and_then(|at| bitmap.get_mut(at)) {
        *byte |= 1 << (page & 7);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_example_of_spec_gives_qemus_offsets() {
        let header = MappedHeader::place(0x6e, 64 << 20).unwrap();

        assert_eq!(header, MappedHeader { bitmap_offset: 0x8a, pages_offset: 0x10_0000 });
        assert_eq!(header.end_of_pages(64 << 20), 0x410_0000);
        assert_eq!(bitmap_bytes(64 << 20), 0x800);
        assert_eq!(bitmap_bytes(4096), 8);
        header.check(0x8a, 64 << 20).unwrap();
        assert_eq!(MappedHeader::place_aligned(0x6e, 64 << 20, 4096).unwrap().pages_offset, 0x1000);
    }

    #[test]
    fn check_header_that_points_astray_is_refused() {
        let length = 64 << 20;
        for (bitmap_offset, pages_offset) in
            [(0x89, 0x10_0000), (0x8a, 0x800), (u64::MAX, 0x10_0000), (0x8a, 0x7fff_ffff_ffff_f000)]
        {
            let header = MappedHeader { bitmap_offset, pages_offset };
            assert!(header.check(0x8a, length).is_err(), "{header:x?}");
        }
        assert!(MappedHeader::place(u64::MAX - 5, length).is_err());
        assert!(MappedHeader::place_aligned(0, length, 512).is_err());
        assert!(MappedHeader::place(1 << 62, u64::MAX - 4095).is_err());
    }
}
