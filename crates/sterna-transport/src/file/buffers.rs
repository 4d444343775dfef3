//! Page-aligned memory of our own for direct I/O.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::DIRECT_ALIGN;

/// Bytes of one buffer: large enough that a disk does not notice the gaps.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Some buffers of [`BUFFER_BYTES`] in one piece of memory. At any time each is either ours or the kernel's;
/// the queue keeps the books.
pub(super) struct Buffers {
    memory: *mut u8,
    count: usize,
}

// SAFETY: plain memory, owned here; who may touch which buffer is decided by the one owner (`&mut`).
unsafe impl Send for Buffers {}

impl Buffers {
    pub(crate) fn new(count: usize) -> Self {
        let layout = layout(count);
        // Mapped, not allocated: an allocation of this alignment is zeroed byte by byte, and most queues of small files
        // never touch more than the first buffer.
        // SAFETY: a new private mapping at a place that the kernel chooses touches no memory that anyone has.
        let mapped = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                layout.size(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let Ok(memory) = mapped else { handle_alloc_error(layout) };
        Self { memory: memory.cast(), count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Where buffer `index` begins.
    pub(crate) fn address(&self, index: usize) -> *mut u8 {
        assert!(index < self.count);
        self.memory.wrapping_add(index * BUFFER_BYTES)
    }

    /// Bytes of a buffer that the kernel does not have.
    ///
    /// # Safety
    /// No I/O on buffer `index` is on its way.
    pub(crate) unsafe fn bytes(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: inside the mapping, initialised (the kernel gives zeros), and nobody else's as the caller says.
        unsafe { std::slice::from_raw_parts_mut(self.address(index), BUFFER_BYTES) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: mapped with this very length, and unmapped nowhere else; the queue waits for all I/O before it drops its
        // buffers.
        let unmapped = unsafe { munmap(self.memory.cast(), layout(self.count).size()) };
        debug_assert!(unmapped.is_ok());
    }
}

fn layout(count: usize) -> Layout {
    assert!(count > 0 && count <= 1 << 16);
    Layout::from_size_align(count * BUFFER_BYTES, DIRECT_ALIGN as usize)
        .unwrap_or_else(|_| unreachable!("a power of two, and far below isize::MAX"))
}
