//! What can go wrong with guest RAM. Every error here is local: either the caller asked for something
//! outside a block, or this machine's kernel refused.

use std::io;

/// A request to a block of guest RAM failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A block's name must be 1 to 255 bytes (it is sent after one length byte).
    #[error("RAM block name {name:?} has {} bytes; use 1 to 255", name.len())]
    Name {
        /// The refused name.
        name: String,
    },
    /// Two blocks of one guest share a name, and the peer could not tell them apart.
    #[error("two RAM blocks are named {name:?}; every block needs a unique name")]
    DuplicateName {
        /// The name that occurs twice.
        name: String,
    },
    /// A block's length is zero or no multiple of its page size.
    #[error(
        "RAM block {block:?} cannot have {len_bytes} bytes: a multiple of {unit_bytes} above zero is needed"
    )]
    Length {
        /// The block's name.
        block: String,
        /// The refused length.
        len_bytes: u64,
        /// The backing's page size.
        unit_bytes: u64,
    },
    /// What was said of memory that the VMM mapped does not fit together.
    #[error("RAM block {block:?} cannot be made over this memory of the VMM: {rule}")]
    External {
        /// The block's name.
        block: String,
        /// What is wrong.
        rule: &'static str,
    },
    /// The VMM does not permit this for memory of its own.
    #[error("the VMM does not permit the engine to {action} RAM block {block:?} (MemoryPermissions)")]
    NotPermitted {
        /// The block's name.
        block: String,
        /// What was to be done.
        action: &'static str,
    },
    /// Memory cannot be given back as long as an adapter uses its pages: see [`RamBlock::pin`](crate::RamBlock::pin).
    #[error(
        "memory of RAM block {block:?} cannot be given back: {len} bytes from {offset:#x} on are registered with an adapter"
    )]
    Pinned {
        /// The block's name.
        block: String,
        /// The first byte that is pinned.
        offset: u64,
        /// How many from there on.
        len: u64,
    },
    /// The block's memory cannot be written.
    #[error("RAM block {block:?} is mapped read-only and cannot be written")]
    ReadOnly {
        /// The block's name.
        block: String,
    },
    /// Another process has the memory: it was given away ([`RamBlock::let_go`](crate::RamBlock::let_go)), or has not come yet
    /// ([`RamBlock::awaiting`](crate::RamBlock::awaiting)).
    #[error("another process has the memory of RAM block {block:?}, and it cannot be accessed here")]
    Gone {
        /// The block's name.
        block: String,
    },
    /// The memory cannot be given to another process.
    #[error("RAM block {block:?} cannot be handed to another process: {rule}")]
    NotSharable {
        /// The block's name.
        block: String,
        /// What is wrong, and what to do.
        rule: &'static str,
    },
    /// This side's block cannot take another process's memory.
    #[error("RAM block {block:?} cannot take memory from another process: {rule}")]
    NotReplaceable {
        /// The block's name.
        block: String,
        /// What is wrong, and what to do.
        rule: &'static str,
    },
    /// A descriptor is not the memory that was promised for a block.
    #[error("the descriptor for RAM block {block:?} is not the promised memory: {what}")]
    Descriptor {
        /// The block's name.
        block: String,
        /// What is wrong.
        what: String,
    },
    /// An access lies outside its block.
    #[error("bytes {offset}..+{len} are not inside RAM block {block:?} of {block_len_bytes} bytes")]
    OutOfRange {
        /// The block's name.
        block: String,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// The block's length.
        block_len_bytes: u64,
    },
    /// An atomic access is not aligned to its size.
    #[error("offset {offset} of RAM block {block:?} is not aligned to {align} bytes")]
    Misaligned {
        /// The block's name.
        block: String,
        /// The refused offset.
        offset: u64,
        /// The alignment that is needed.
        align: u64,
    },
    /// A bitmap given for a block has another number of pages than the block.
    #[error("a bitmap of {bitmap_pages} pages was given for RAM block {block:?} of {block_pages} pages")]
    BitmapSize {
        /// The block's name.
        block: String,
        /// Pages in the bitmap.
        bitmap_pages: u64,
        /// Pages in the block.
        block_pages: u64,
    },
    /// A page has failed (an uncorrectable error of this machine's memory), and its content is lost.
    #[error("{page} has failed (poisoned memory); its content is lost")]
    Poisoned {
        /// Where it is.
        page: crate::PoisonedPage,
    },
    /// There is no huge page left for a part of a block on huge pages.
    #[error(
        "RAM block {block:?}: no huge page is available for bytes {offset}..+{len}: reserve more of them \
         (vm.nr_hugepages), or look at the limit of this process's cgroup (hugetlb)"
    )]
    NoHugePage {
        /// The block's name.
        block: String,
        /// First byte that was to be populated.
        offset: u64,
        /// Bytes that were to be populated.
        len: u64,
    },
    /// The kernel refused.
    #[error("RAM block {block:?}: {call} failed: {source}")]
    System {
        /// The block's name.
        block: String,
        /// The system call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A dirty source failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyError {
    /// This machine's kernel lacks what the source needs.
    #[error("dirty source {origin} cannot be used on this machine: {what} ({source}); choose another source")]
    Unsupported {
        /// The source's name.
        origin: &'static str,
        /// What is missing.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The VMM does not permit this for memory of its own.
    #[error(
        "dirty source {origin}: the VMM does not permit the engine to {action} RAM block {block:?}; permit it \
         (MemoryPermissions), or choose another source"
    )]
    NotPermitted {
        /// The source's name.
        origin: &'static str,
        /// What was to be done.
        action: &'static str,
        /// The block's name.
        block: String,
    },
    /// What the source is over cannot be changed now.
    #[error(
        "dirty source {origin}: {what} cannot be changed while writes are tracked; wait for the migration's end"
    )]
    Running {
        /// The source's name.
        origin: &'static str,
        /// What was to be changed.
        what: &'static str,
    },
    /// A KVM memory slot does not fit the guest RAM that it was said to map.
    #[error("KVM slot {slot}: {rule}")]
    Slot {
        /// The slot's number.
        slot: u32,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// The kernel does not make dirty rings of this size. It says the same of a small ring as of one that comes too
    /// late, when the VM has vCPUs or rings.
    #[error(
        "a dirty ring of {entries} entries is impossible: use a power of two from 1024 to {most} (some processors \
         do with 256), and switch the rings on once, before the VM's first vCPU"
    )]
    RingSize {
        /// Entries asked for.
        entries: u32,
        /// The most that this kernel has.
        most: u32,
    },
    /// An entry of a dirty ring names a page that the VM's slots do not have. What it stood for is unknown, so
    /// tracking cannot be trusted any more until it is stopped and started.
    #[error(
        "the dirty ring of vcpu {vcpu} names page {offset} of slot {slot}, which this source does not know: the VMM \
         has made a slot since, or left one out, or the kernel is at fault. A page was written and nobody knows \
         which: stop tracking and start anew, with every slot that is logged"
    )]
    RingEntry {
        /// Whose ring.
        vcpu: usize,
        /// The slot's number.
        slot: u32,
        /// The page, counted inside the slot.
        offset: u64,
    },
    /// A range of guest-physical memory that a log was to be made for is not possible.
    #[error("range {index} of guest memory: {rule}")]
    GuestRange {
        /// Its place in the list.
        index: usize,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// A log has no room for the guest's highest address; back ends would write after its end.
    #[error(
        "dirty source {origin}: a log of {log_bytes} bytes is too small, the guest's highest address needs \
         {needed_bytes}"
    )]
    LogTooSmall {
        /// The source's name.
        origin: &'static str,
        /// The refused size.
        log_bytes: u64,
        /// The least that is needed.
        needed_bytes: u64,
    },
    /// The caller's range or bitmap does not fit the block.
    #[error("dirty source {origin}: {rule} (block {block})")]
    Range {
        /// The source's name.
        origin: &'static str,
        /// Index of the block.
        block: usize,
        /// What is wrong.
        rule: &'static str,
    },
    /// The source was asked for dirty pages while it was not started.
    #[error("dirty source {origin} is not started; call start() first")]
    NotStarted {
        /// The source's name.
        origin: &'static str,
    },
    /// The kernel refused.
    #[error("dirty source {origin}: {call} failed on {what} {index}: {source}")]
    System {
        /// The source's name.
        origin: &'static str,
        /// The system call or ioctl.
        call: &'static str,
        /// "block", "slot", "log", "vcpu" or "ring size": of what `index` is the number.
        what: &'static str,
        /// Which of them.
        index: u64,
        /// Why.
        source: io::Error,
    },
}
