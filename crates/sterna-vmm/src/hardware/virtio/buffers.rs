//! Pieces of guest memory that a descriptor chain names, for reading or writing.

use sterna_ram::{GuestRam, PAGE_SIZE};
use vm_memory::bitmap::Bitmap;

use crate::hardware::memory::Slice;

/// A list of pieces of guest memory. The guest may write them at any time.
#[derive(Default)]
pub(crate) struct Buffers<'a>(Vec<Slice<'a>>);

impl<'a> Buffers<'a> {
    pub(crate) fn push(&mut self, slice: Slice<'a>) {
        if !slice.is_empty() {
            self.0.push(slice);
        }
    }

    /// Total length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Slice::len).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes `bytes` from the front. If there are fewer, returns `None` and removes nothing.
    pub(crate) fn split_front(&mut self, bytes: usize) -> Option<Self> {
        if bytes > self.len() {
            return None;
        }
        let mut front = Self::default();
        let mut missing = bytes;
        while missing > 0 {
            let first = self.0.first()?;
            let taken = missing.min(first.len());
            front.push(first.subslice(0, taken).ok()?);
            match first.subslice(taken, first.len() - taken).ok().filter(|rest| !rest.is_empty()) {
                Some(rest) => self.0[0] = rest,
                None => drop(self.0.remove(0)),
            }
            missing -= taken;
        }
        Some(front)
    }

    /// Removes `bytes` from the end. If there are fewer, returns `None` and removes nothing.
    pub(crate) fn split_back(&mut self, bytes: usize) -> Option<Self> {
        if bytes > self.len() {
            return None;
        }
        let mut back = Vec::new();
        let mut missing = bytes;
        while missing > 0 {
            let last = self.0.pop()?;
            let taken = missing.min(last.len());
            let kept = last.len() - taken;
            back.push(last.subslice(kept, taken).ok()?);
            if kept > 0 {
                self.push(last.subslice(0, kept).ok()?);
            }
            missing -= taken;
        }
        back.reverse();
        Some(Self(back))
    }

    /// Copies the first bytes out, as many as fit, and returns their number.
    pub(crate) fn read(&self, mut to: &mut [u8]) -> usize {
        let most = to.len();
        for slice in &self.0 {
            let copied = slice.copy_to(to);
            to = &mut to[copied..];
        }
        most - to.len()
    }

    /// Copies bytes in, as many as fit, and returns their number.
    pub(crate) fn write(&self, mut from: &[u8]) -> usize {
        let most = from.len();
        for slice in &self.0 {
            let length = slice.len().min(from.len());
            slice.copy_from(&from[..length]);
            from = &from[length..];
        }
        most - from.len()
    }

    /// I/O vectors for system calls. The memory stays mapped as long as the VM exists.
    pub(crate) fn vectors(&self) -> Vec<libc::iovec> {
        let vector = |slice: &Slice<'_>| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        };
        self.0.iter().map(vector).collect()
    }

    /// Host addresses and lengths of the pieces.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        self.0.iter().map(|slice| (slice.ptr_guard().as_ptr() as usize, slice.len()))
    }

    /// Whole pages of `ram` within the pieces: block, first page, and number of pages.
    pub(crate) fn whole_pages(&self, ram: &GuestRam) -> impl Iterator<Item = (usize, u64, u64)> {
        self.places().filter_map(|(address, bytes)| {
            let start = address.next_multiple_of(PAGE_SIZE);
            let pages = (address + bytes).saturating_sub(start) / PAGE_SIZE;
            let (block, first) = ram.page_at(start).filter(|_| pages > 0)?;
            Some((block, first, pages as u64))
        })
    }

    /// Marks the memory as dirty, because the kernel may have written it.
    pub(crate) fn were_written(&self) {
        self.0.iter().for_each(|slice| slice.bitmap().mark_dirty(0, slice.len()));
    }
}
