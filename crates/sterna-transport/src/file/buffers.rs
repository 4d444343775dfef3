//! Page-aligned memory of this process for direct I/O.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::alignment::DIRECT_ALIGN;

/// Size of one buffer in bytes. It is large enough that the gaps between requests do not slow a disk down.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Several buffers of [`BUFFER_BYTES`] in one mapping.
///
/// At any time each buffer belongs either to this process or to the kernel. The queue keeps track of it.
pub(super) struct Buffers {
    memory: *mut u8,
    count: usize,
}

// SAFETY: plain memory, owned here. The single owner (`&mut`) decides which thread touches which buffer.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(crate) fn new(count: usize) -> Self {
        let layout = layout(count);
        // Mapped, not allocated: an allocator zeroes memory of this alignment byte by byte, and most queues of
        // small files touch only the first buffer.
        // SAFETY: a new private mapping at an address that the kernel chooses overlaps no existing memory.
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

    /// Start of buffer `index`.
    pub(crate) fn address(&self, index: usize) -> *mut u8 {
        assert!(index < self.count);
        self.memory.wrapping_add(index * BUFFER_BYTES)
    }

    /// The bytes of a buffer that the kernel is not using.
    ///
    /// # Safety
    /// No I/O on buffer `index` is in progress.
    pub(crate) unsafe fn bytes(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: the range is inside the mapping and initialised (the kernel zeroes it). The caller guarantees
        // sole access.
        unsafe { std::slice::from_raw_parts_mut(self.address(index), BUFFER_BYTES) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: mapped with the same length, and unmapped nowhere else. The queue waits for all I/O before it
        // drops its buffers.
        let unmapped = unsafe { munmap(self.memory.cast(), layout(self.count).size()) };
        debug_assert!(unmapped.is_ok());
    }
}

fn layout(count: usize) -> Layout {
    assert!(count > 0 && count <= 1 << 16);
    Layout::from_size_align(count * BUFFER_BYTES, DIRECT_ALIGN as usize)
        .unwrap_or_else(|_| unreachable!("a power of two, and far below isize::MAX"))
}
