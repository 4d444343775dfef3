//! Lists of memory for vectored calls.

use sterna_ram::RamSlice;

/// Something to write: bytes of ours or guest RAM in place.
#[derive(Debug, Clone, Copy)]
pub enum IoPart<'a> {
    /// Bytes of ours.
    Bytes(&'a [u8]),
    /// Guest RAM, read by the kernel straight from where it is.
    Ram(RamSlice<'a>),
}

/// A piece of memory as the kernel sees it.
pub(crate) trait Part {
    /// Where it begins and how long it is. Only ever given to the kernel.
    fn raw(&self) -> (*mut u8, usize);
}

impl Part for IoPart<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        match self {
            IoPart::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            IoPart::Ram(slice) => Part::raw(slice),
        }
    }
}

impl Part for RamSlice<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        (self.as_ptr(), self.len())
    }
}

/// Vectors in one call: well below the kernel's IOV_MAX of 1024, and enough for 1 MiB of scattered pages.
const BATCH: usize = 256;

/// One call's worth of vectors, without allocation.
pub(crate) struct Vectors {
    list: [libc::iovec; BATCH],
    count: usize,
}

impl Vectors {
    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::iovec {
        self.list.as_mut_ptr()
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// What is left of a list of parts.
pub(crate) struct Remaining<'p, P> {
    parts: &'p [P],
    /// Bytes of the first part that are done.
    done: usize,
    bytes: u64,
}

impl<'p, P: Part> Remaining<'p, P> {
    pub(crate) fn new(parts: &'p [P]) -> Self {
        let bytes = parts.iter().map(|part| part.raw().1 as u64).sum();
        Remaining { parts, done: 0, bytes }
    }

    /// Bytes that are left.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The vectors of the next call. Neighbours in memory become one vector.
    pub(crate) fn vectors(&self) -> Vectors {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = Vectors { list: [empty; BATCH], count: 0 };
        let mut end = std::ptr::null_mut();
        for (index, part) in self.parts.iter().enumerate() {
            let (mut start, mut len) = part.raw();
            if index == 0 {
                start = start.wrapping_add(self.done);
                len -= self.done;
            }
            if len == 0 {
                continue;
            }
            if vectors.count > 0 && start == end {
                vectors.list[vectors.count - 1].iov_len += len;
            } else if vectors.count == BATCH {
                break;
            } else {
                vectors.list[vectors.count] = libc::iovec { iov_base: start.cast(), iov_len: len };
                vectors.count += 1;
            }
            end = start.wrapping_add(len);
        }
        vectors
    }

    /// Leaves out the next `bytes` bytes.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.bytes -= bytes as u64;
        self.done += bytes;
        while let Some(first) = self.parts.first() {
            let len = first.raw().1;
            if self.done < len {
                break;
            }
            self.done -= len;
            self.parts = &self.parts[1..];
        }
    }
}
