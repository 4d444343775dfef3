//! Files for pages: complete or absent, sparse, past the page cache where that can be had.
//!
//! # The model
//! A [`PageFile`] that is being created is a *staging file*: in the directory of its place, under a hidden name that
//! ends in `.partial`. [`PageFile::complete`] puts its bytes on the disk, renames it into its place and puts
//! the directory on the disk; dropped before that, it is gone, unless it is to be [kept](PageFile::keep). A file that is
//! replaced changes places with the new one and is removed when the directory is on the disk; if that fails, the two
//! change back. So the place holds a complete file or what it held before, whatever happens: a full disk, a failing
//! one, a cancel, `kill -9` (which leaves the `.partial`; [`PageFile::stale_staging_files`] finds those that nobody writes any
//! more). File systems without exchange link the old file to another name meanwhile; only where there are no links either, the
//! new file stays in the place although its directory could not be synced.
//!
//! Bytes go to any offset from any thread ([`PageFile::write_at`]). What is large goes through a
//! [`PageQueue`], one for each thread: aligned pieces of up to some MiB, several on their way at once, past
//! the page cache, straight out of guest RAM or into it. A [`RangeReader`] hands out ranges in order, read ahead.
//! What nobody writes stays a hole.
//!
//! # Direct I/O
//! [`Direct`] says whether it is wanted. It needs a file system that has it (asked by `statx` and by opening);
//! without it [`Direct::Wanted`] goes through the page cache and [`PageFile::is_direct`] says so, and
//! [`Direct::Required`] is refused. Whole pages at page-aligned offsets go directly, the rest (headers, bitmaps,
//! the ends of odd ranges) through the page cache of the same file; the kernel keeps the two coherent as long as
//! nobody writes the same page both ways at once, which the callers' layouts exclude: pages are pages.
//!
//! With io_uring a queue keeps several pieces on their way; without it (old kernels, seccomp, `io_uring_disabled`)
//! a queue writes and reads one piece at a time, and more threads make up for it.

mod buffers;
mod page_file;
mod queue;
mod reader;
mod ring;
mod sparse;
mod staging;
mod system;

pub use page_file::{CreateOptions, Direct, OpenOptions, PageFile};
pub use queue::{PageQueue, QueueOptions};
pub use reader::RangeReader;

/// Offsets, lengths and addresses of direct I/O are multiples of this. File systems ask for 512 or 4096.
pub const DIRECT_ALIGN: u64 = 4096;
