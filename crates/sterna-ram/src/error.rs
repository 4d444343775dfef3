//! Errors of guest RAM and of dirty sources. Every error is local: the caller's request was invalid, or this
//! machine's kernel refused it.

use std::io;

/// The reason why a request to a block of guest RAM failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A block's name is empty or longer than 255 bytes. The stream sends its length in one byte.
    #[error("RAM block name {name:?} has {} bytes; use 1 to 255", name.len())]
    Name {
        /// The name that was refused.
        name: String,
    },
    /// Two blocks of a guest have the same name, so the peer cannot distinguish them.
    #[error("two RAM blocks have the name {name:?}; every block needs a unique name")]
    DuplicateName {
        /// The name that two blocks have.
        name: String,
    },
    /// A block's length is zero or not a multiple of its page size.
    #[error(
        "RAM block {block:?} cannot have {len_bytes} bytes: a multiple of {unit_bytes} above zero is needed"
    )]
    Length {
        /// Name of the affected RAM block.
        block: String,
        /// The refused length, in bytes.
        len_bytes: u64,
        /// The page size of the backing.
        unit_bytes: u64,
    },
    /// The properties that were stated for memory of the VMM contradict each other.
    #[error("RAM block {block:?} cannot use this memory of the VMM: {rule}")]
    External {
        /// Name of the affected RAM block.
        block: String,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// The VMM does not permit this operation on its own memory.
    #[error("the VMM does not permit the engine to {action} RAM block {block:?} (MemoryPermissions)")]
    NotPermitted {
        /// Name of the affected RAM block.
        block: String,
        /// The operation that was refused, as part of the message.
        action: &'static str,
    },
    /// Memory cannot be given back while an adapter uses its pages: see
    /// [`RamBlock::pin`](crate::RamBlock::pin).
    #[error(
        "memory of RAM block {block:?} cannot be released: {len} bytes at {offset:#x} are registered with an adapter"
    )]
    Pinned {
        /// Name of the affected RAM block.
        block: String,
        /// Offset of the first pinned byte.
        offset: u64,
        /// Number of pinned bytes from `offset` on.
        len: u64,
    },
    /// The block's memory is read-only.
    #[error("RAM block {block:?} is mapped read-only and cannot be written")]
    ReadOnly {
        /// Name of the affected RAM block.
        block: String,
    },
    /// Another process has the memory.
    ///
    /// Either this process gave it away ([`RamBlock::let_go`](crate::RamBlock::let_go)), or it has not arrived
    /// yet ([`RamBlock::awaiting`](crate::RamBlock::awaiting)).
    #[error("another process has the memory of RAM block {block:?}, and it cannot be accessed here")]
    Gone {
        /// Name of the affected RAM block.
        block: String,
    },
    /// The memory cannot be handed to another process.
    #[error("RAM block {block:?} cannot be passed to another process: {rule}")]
    NotSharable {
        /// Name of the affected RAM block.
        block: String,
        /// The violated rule, and how to satisfy it.
        rule: &'static str,
    },
    /// This side's block cannot take over another process's memory.
    #[error("RAM block {block:?} cannot take memory from another process: {rule}")]
    NotReplaceable {
        /// Name of the affected RAM block.
        block: String,
        /// The violated rule, and how to satisfy it.
        rule: &'static str,
    },
    /// A descriptor does not contain the memory that was promised for a block.
    #[error("the descriptor for RAM block {block:?} is not the promised memory: {what}")]
    Descriptor {
        /// Name of the affected RAM block.
        block: String,
        /// The difference between the descriptor and the promise.
        what: String,
    },
    /// An access is outside of its block.
    #[error("bytes {offset}..+{len} are not inside RAM block {block:?} of {block_len_bytes} bytes")]
    OutOfRange {
        /// Name of the affected RAM block.
        block: String,
        /// Offset of the first requested byte.
        offset: u64,
        /// Number of requested bytes.
        len: u64,
        /// Length of the block in bytes.
        block_len_bytes: u64,
    },
    /// An atomic access is not aligned to its size.
    #[error("offset {offset} of RAM block {block:?} is not aligned to {align} bytes")]
    Misaligned {
        /// Name of the affected RAM block.
        block: String,
        /// The refused offset in the block, in bytes.
        offset: u64,
        /// The alignment that is needed.
        align: u64,
    },
    /// The bitmap for a block has another number of pages than the block.
    #[error("a bitmap of {bitmap_pages} pages was given for RAM block {block:?} of {block_pages} pages")]
    BitmapSize {
        /// Name of the affected RAM block.
        block: String,
        /// Pages in the bitmap.
        bitmap_pages: u64,
        /// Pages in the block.
        block_pages: u64,
    },
    /// A page has failed (an uncorrectable error of this machine's memory). Its content is lost.
    #[error("{page} has failed (poisoned memory); its content is lost")]
    Poisoned {
        /// The failed page, with its block and offset.
        page: crate::poison::PoisonedPage,
    },
    /// The file system of a block's file has no space for an accessed page.
    #[error(
        "RAM block {block:?}: the file system of its file has no space for the page at byte {offset} ({source}): free \
         space there, or allocate the whole file when it is created (fallocate)"
    )]
    NoSpace {
        /// Name of the affected RAM block.
        block: String,
        /// Offset of the first byte of the page.
        offset: u64,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// No free huge page is left for a part of a block on huge pages.
    #[error(
        "RAM block {block:?}: no huge page is available for bytes {offset}..+{len}: reserve more huge pages \
         (vm.nr_hugepages), or check the limit of this process's cgroup (hugetlb)"
    )]
    NoHugePage {
        /// Name of the affected RAM block.
        block: String,
        /// Offset of the first byte that could not be populated.
        offset: u64,
        /// Number of bytes that could not be populated.
        len: u64,
    },
    /// This process may not read its page table, so absent pages of private memory cannot be found.
    #[error(
        "RAM block {block:?}: this process cannot find out which pages were never written, so it reads all of them:          {call} failed ({source}); call sterna::ram::keep_pagemap before the sandbox makes /proc/self/pagemap \
         unreachable"
    )]
    PageTable {
        /// Name of the first affected RAM block.
        block: String,
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// A system call failed.
    #[error("RAM block {block:?}: {call} failed: {source}")]
    System {
        /// Name of the affected RAM block.
        block: String,
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
}

/// The reason why a dirty source failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyError {
    /// This machine's kernel lacks a feature that the source needs.
    #[error("dirty source {origin} cannot be used on this machine: {what} ({source}); choose another source")]
    Unsupported {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// The feature that the kernel lacks.
        what: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// The VMM does not permit this operation on its own memory.
    #[error(
        "dirty source {origin}: the VMM does not permit the engine to {action} RAM block {block:?}; permit it \
         (MemoryPermissions), or choose another source"
    )]
    NotPermitted {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// The operation that was refused, as part of the message.
        action: &'static str,
        /// Name of the affected RAM block.
        block: String,
    },
    /// The memory or the slots of the source cannot be changed while it tracks writes.
    #[error(
        "dirty source {origin}: {what} cannot be changed while writes are tracked; wait until the migration has ended"
    )]
    Running {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// The part that cannot be changed.
        what: &'static str,
    },
    /// A KVM memory slot does not match the guest RAM that it should map.
    #[error("KVM slot {slot}: {rule}")]
    Slot {
        /// Number of the KVM memory slot.
        slot: u32,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// The kernel refuses dirty rings of this size.
    ///
    /// The kernel returns the same error if the rings are switched on too late, after the VM has vCPUs or
    /// rings.
    #[error(
        "a dirty ring cannot have {entries} entries: use a power of two from 1024 to {most} (on some processors from \
         256), and switch the rings on once, before the VM's first vCPU"
    )]
    RingSize {
        /// Requested number of entries.
        entries: u32,
        /// Largest number of entries that this kernel supports.
        most: u32,
    },
    /// An entry of a dirty ring names a page of no slot.
    ///
    /// The written page is unknown, so tracking cannot be trusted until it is stopped and started again.
    #[error(
        "the dirty ring of vcpu {vcpu} contains page {offset} of slot {slot}, which this source does not know: the \
         VMM has created a slot later or left one out, or the kernel is faulty. It is unknown which page was written: \
         stop tracking and start it again, with every slot that is logged"
    )]
    RingEntry {
        /// Index of the vCPU to which the ring belongs.
        vcpu: usize,
        /// Number of the KVM memory slot.
        slot: u32,
        /// The page, counted from the begin of the slot.
        offset: u64,
    },
    /// A range of guest-physical memory cannot be logged.
    #[error("range {index} of guest memory: {rule}")]
    GuestRange {
        /// Index of the range in the list.
        index: usize,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// A log is too small for the guest's highest address. Back ends would write past its end.
    #[error(
        "dirty source {origin}: a log of {log_bytes} bytes is too small; the guest's highest address needs \
         {needed_bytes}"
    )]
    LogTooSmall {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// The refused size, in bytes.
        log_bytes: u64,
        /// Smallest size that is sufficient.
        needed_bytes: u64,
    },
    /// The caller's range or bitmap does not match the block.
    #[error("dirty source {origin}: {rule} (block {block})")]
    Range {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// Index of the block.
        block: usize,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// The source was asked for dirty pages before it was started.
    #[error("dirty source {origin} is not started; call start() first")]
    NotStarted {
        /// Name of the dirty source that failed.
        origin: &'static str,
    },
    /// A system call or ioctl failed.
    #[error("dirty source {origin}: {call} failed on {what} {index}: {source}")]
    System {
        /// Name of the dirty source that failed.
        origin: &'static str,
        /// Name of the system call or ioctl.
        call: &'static str,
        /// The kind of object that `index` numbers: "block", "slot", "log", "vcpu" or "ring size".
        what: &'static str,
        /// The number of that object.
        index: u64,
        /// The error that the kernel returned.
        source: io::Error,
    },
}
