//! Lists of memory for vectored calls. `sendmsg`, `recvmsg` and file I/O take many pieces in one call.

use sterna_ram::{RamFault, RamSlice};

/// One piece of a vectored write: this process's bytes, or guest RAM in place.
#[derive(Debug, Clone, Copy)]
pub enum IoPart<'a> {
    /// Bytes in a buffer of this process.
    Bytes(&'a [u8]),
    /// Guest RAM; the kernel reads it in place, without a copy.
    Ram(RamSlice<'a>),
}

/// A piece of memory as the kernel sees it: start and length.
pub(crate) trait Part {
    /// Start and length in bytes. Only the kernel may dereference the pointer.
    fn raw(&self) -> (*mut u8, usize);

    /// The bytes to write, if no other thread can change them meanwhile.
    #[cfg(feature = "tls")]
    fn bytes(&self) -> Option<&[u8]> {
        None
    }
}

impl Part for IoPart<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        match self {
            IoPart::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            IoPart::Ram(slice) => Part::raw(slice),
        }
    }

    #[cfg(feature = "tls")]
    fn bytes(&self) -> Option<&[u8]> {
        match self {
            IoPart::Bytes(bytes) => Some(bytes),
            IoPart::Ram(_) => None,
        }
    }
}

impl Part for RamSlice<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        (self.as_ptr(), self.len())
    }
}

/// Wraps a buffer of this process as a part to read into.
pub(crate) fn own(buffer: &mut [u8]) -> Own<'_> {
    Own { pointer: buffer.as_mut_ptr(), len: buffer.len(), buffer: std::marker::PhantomData }
}

pub(crate) struct Own<'a> {
    pointer: *mut u8,
    len: usize,
    /// Keeps the buffer borrowed while the kernel may write to it.
    buffer: std::marker::PhantomData<&'a mut [u8]>,
}

impl Part for Own<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        let _ = self.buffer;
        (self.pointer, self.len)
    }
}

/// Destination of a read: guest RAM or a buffer of this process.
pub(crate) enum Place<'a> {
    Ram(RamSlice<'a>),
    Own(&'a Own<'a>),
}

impl Part for Place<'_> {
    fn raw(&self) -> (*mut u8, usize) {
        match self {
            Place::Ram(slice) => slice.raw(),
            Place::Own(own) => own.raw(),
        }
    }
}

/// Maximum vectors in one call. It is well below the kernel's IOV_MAX of 1024, and enough for 1 MiB of scattered
/// pages.
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

/// The unfinished end of a list of parts.
pub(crate) struct Remaining<'p, P> {
    parts: &'p [P],
    /// Bytes of the first part that are already transferred.
    done: usize,
    bytes: u64,
    /// The first page of guest RAM that failed under a copy.
    fault: Option<RamFault>,
}

impl<P> Clone for Remaining<'_, P> {
    fn clone(&self) -> Self {
        Remaining { parts: self.parts, done: self.done, bytes: self.bytes, fault: self.fault }
    }
}

impl<'p, P: Part> Remaining<'p, P> {
    pub(crate) fn new(parts: &'p [P]) -> Self {
        let bytes = parts.iter().map(|part| part.raw().1 as u64).sum();
        Remaining { parts, done: 0, bytes, fault: None }
    }

    /// Bytes that are still to be transferred.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The vectors of the next call. Parts that are adjacent in memory become one vector.
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

    /// The page of guest RAM that failed during a copy. The copied bytes are then invalid.
    pub(crate) fn fault(&self) -> Option<RamFault> {
        self.fault
    }

    /// Copies bytes of `from` into the next parts, as many as fit. Advances past them and returns their count.
    pub(crate) fn put_bytes(&mut self, from: &[u8]) -> usize {
        let mut count = 0;
        while let Some(place) = self.front(from.len() - count) {
            let copied = place.copy_from(&from[count..count + place.len()]);
            self.fault = self.fault.or(copied.err());
            count += place.len();
            self.advance(place.len());
        }
        count
    }

    /// Copies bytes of the next parts into `to`, as many as fit. Advances past them and returns their count.
    pub(crate) fn take_bytes(&mut self, to: &mut [u8]) -> usize {
        let mut count = 0;
        while let Some(place) = self.front(to.len() - count) {
            let copied = place.copy_to(&mut to[count..count + place.len()]);
            self.fault = self.fault.or(copied.err());
            count += place.len();
            self.advance(place.len());
        }
        count
    }

    /// The next `count` bytes, if one part has them all and they may be used in place.
    #[cfg(feature = "tls")]
    pub(crate) fn in_place(&self, count: usize) -> Option<&'p [u8]> {
        self.parts.first()?.bytes()?.get(self.done..self.done + count)
    }

    /// A window on the next bytes, at most `most`; `None` if there are none.
    fn front(&self, most: usize) -> Option<RamSlice<'p>> {
        let (start, len) = self.parts.iter().enumerate().find_map(|(index, part)| {
            let (start, len) = part.raw();
            let done = if index == 0 { self.done } else { 0 };
            (len > done).then(|| (start.wrapping_add(done), len - done))
        })?;
        if most == 0 {
            return None;
        }
        // SAFETY: the part is borrowed for 'p. It is guest RAM, which only windows may touch, or a buffer of this
        // process. The part does not use the buffer's borrow meanwhile, as during a kernel call. Parts to write
        // from are only read through the window.
        Some(unsafe { RamSlice::from_raw(start, len.min(most)) })
    }

    /// Marks the next `bytes` bytes as transferred.
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
