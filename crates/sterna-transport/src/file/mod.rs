//! Files for pages: sparse, with direct I/O where available. A new file appears at its path complete or not at all.
//!
//! # The model
//! A [`PageFile`] that is being created is a *staging file*. It is in the directory of its place, under a hidden
//! name that ends in `.partial`. [`PageFile::complete`] publishes it: it syncs the file, renames it to its place
//! and syncs the directory. A staging file that is dropped before that is removed, unless it is to be
//! [kept](PageFile::keep).
//!
//! If a file exists at the place, the two files are exchanged. The old one is removed after the sync of the
//! directory; if that sync fails, the two are exchanged back. The place therefore contains either the complete new
//! file or its previous content, whatever happens: a full or failing disk, a cancel, or `kill -9`. (`kill -9`
//! leaves the `.partial` file; [`PageFile::stale_staging_files`] finds those that no process writes any more.)
//!
//! On a file system without exchange, the old file gets a second name by a link meanwhile. On one without links
//! too, a new file stays in the place even if its directory could not be synced.
//!
//! Any thread can write at any offset ([`PageFile::write_at`]). Large data goes through a [`PageQueue`], one per
//! thread. A queue moves aligned pieces of up to some MiB, several in parallel, past the page cache, directly from
//! or to guest RAM. A [`RangeReader`] returns ranges in order and reads ahead. Ranges that are never written stay
//! holes.
//!
//! # Direct I/O
//! [`Direct`] requests direct I/O. The file system must support it (checked by `statx` and by opening the file).
//! Without support, [`Direct::Wanted`] uses the page cache and [`PageFile::is_direct`] returns false;
//! [`Direct::Required`] is refused.
//!
//! Whole pages at page-aligned offsets are written and read directly. All other bytes (headers, bitmaps, the ends
//! of unaligned ranges) go through the page cache of the same file. The kernel keeps the two coherent unless the
//! same page is written both ways at the same time. The layouts of the callers exclude that.
//!
//! With io_uring a queue has several pieces in progress. Without it (old kernels, seccomp, `io_uring_disabled`) a
//! queue writes or reads one piece at a time, and several threads make up for it.

mod aborted;
mod alignment;
mod buffers;
mod page_file;
mod queue;
mod reader;
mod ring;
mod sparse;
mod staging;
mod system;

pub use alignment::DIRECT_ALIGN;
pub use page_file::{CreateOptions, Direct, OpenOptions, PageFile};
pub use queue::{PageQueue, QueueOptions};
pub use reader::RangeReader;
