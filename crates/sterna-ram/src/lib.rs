//! Guest RAM: memory blocks, page bitmaps and dirty sources. The crate knows no migration protocol.
//!
//! # The model
//! A guest's memory ([`GuestRam`]) is a list of named *blocks* ([`RamBlock`]). Each block is one mapping of
//! this process.
//!
//! - The engine can map the memory itself ([`RamBlock::new`]).
//! - A VMM can provide its own memory ([`RamBlock::from_external`]; with the feature `vm-memory`, a whole
//!   `GuestMemoryMmap` by `GuestRam::from_guest_memory`). [`MemoryPermissions`] then states what the engine may
//!   do to it.
//!
//! A page has [`PAGE_SIZE`] bytes, whatever the page size of the backing is, and an index inside its block.
//!
//! The guest and its devices may write any byte at any time, so this crate never forms a Rust reference to RAM.
//! A checked window is a [`RamSlice`]: a pointer and a length. Its bytes are accessed by volatile operations or
//! by the kernel.
//!
//! A [`PageBitmap`] has one bit per page, in atomic words, so that dirty sources set bits while lanes take runs
//! of neighbouring pages. A [`dirty::DirtySource`] reports which pages were written.
//!
//! Host memory can fail. Pages that are known to have failed are never accessed ([`RamBlock::mark_poisoned`]).
//! If a page fails during a copy or a scan, the result is a [`RamFault`], provided that the VMM forwards SIGBUS
//! ([`guard::handle_sigbus`]).
//!
//! Pages that were never populated are found without reading them ([`RamBlock::mark_absent`]), because reading
//! a hole of a memfd would allocate it.
#![warn(unreachable_pub)]

mod absent;
mod atomic;
mod bitmap;
mod block;
mod completing;
mod custody;
mod descriptors;
pub mod dirty;
pub mod engine_lock;
mod error;
mod external;
mod filling;
pub mod guard;
mod guest;
#[cfg(feature = "vm-memory")]
mod guest_memory;
mod kept;
mod mapping;
pub mod merge;
pub mod missing_pages;
mod page;
pub mod peer_memory;
mod permissions;
mod pinned;
mod poison;
mod slice;
mod sys;
pub mod threads;
mod userfault;
pub mod write_protection;
pub mod zero;
mod zeroing;

pub use crate::permissions::MemoryPermissions;
pub use bitmap::{PageBitmap, Run};
pub use block::{RamBlock, SharedFile};
pub use completing::Completing;
pub use custody::{Custody, CustodyClaim};
pub use descriptors::TakenMemory;
pub use dirty::DirtySource;
pub use dirty::{DirtyBitmaps, SyncReport, SyncTimes};
pub use error::{DirtyError, RamError};
pub use external::ExternalMemory;
pub use filling::{Filling, Hurry};
pub use guard::RamFault;
pub use guest::{ChangeError, GuestRam, TrackingClaim};
#[cfg(feature = "vm-memory")]
pub use guest_memory::RegionPlan;
pub use kept::{keep_pagemap, keep_userfaultfd};
pub use mapping::Backing;
pub use page::{PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE};
pub use pinned::PinnedRam;
pub use poison::PoisonedPage;
pub use slice::RamSlice;
pub use sys::{is_failed_memory, processors};
pub use zeroing::Emptied;

/// Compiles the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
