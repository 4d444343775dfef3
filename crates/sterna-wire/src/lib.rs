//! Encoders and decoders for every message that a Sterna sends or receives.
//!
//! The functions take byte slices and return values. They read no socket and no clock, and contain no `unsafe`.
//! They check each length of the peer against [`limits`] before they allocate. A decoder that needs more bytes
//! returns `Ok(None)` or [`main::Step::NeedMore`]. A decoder that finds wrong bytes returns a [`WireError`],
//! which names the byte, the rule, the paragraph and the side at fault.
//!
//! | module | contents |
//! | --- | --- |
//! | [`main`] | the main channel: header, configuration, sections, commands, the incremental decoder |
//! | `nbd` (feature `standby`) | the NBD protocol, with which a standby serves a guest's disk |
//! | [`ram`] | records inside the RAM section: words, block list, writers |
//! | [`multifd`] | the multifd channels: initial packet, RAM packets, device-state packets |
//! | `rdma` (feature `rdma`) | private data and control messages of the transport `rdma:` |
//! | `replica` (feature `standby`) | messages between primary and standby of a protected guest, in addition to its state |
//! | [`return_path`] | messages from the destination to the source |
//! | [`received_pages`] | the pages that a destination has after an interrupted postcopy |
//! | [`xbzrle`] | pages sent as a difference to their older content |
//! | [`vmdesc`] | the JSON after the end of the stream, which contains the lengths of device bodies |
//! | [`global_state`] | the run state of the guest before the migration |
//! | [`mapped_ram`] | the place of each page in an image |
//! | `colo` (feature `standby`) | checkpoints after the end of a migration: messages, their order, device state |
//! | [`libvirt`] | the header of libvirt's save images |
//! | [`extension`] | messages between two Sternas beyond QEMU's format |
//!
//! Paragraph numbers in docs and errors refer to `specs/` in the project's repository.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]
// The module `main` is the main channel, not the root of a program.
#![allow(special_module_name)]

#[cfg(feature = "standby")]
pub mod colo;
pub mod error;
pub mod extension;
pub mod global_state;
pub mod libvirt;
pub mod limits;
pub mod main;
pub mod mapped_ram;
pub mod multifd;
#[cfg(feature = "standby")]
pub mod nbd;
pub mod ram;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod received_pages;
#[cfg(feature = "standby")]
pub mod replica;
pub mod return_path;
pub mod vmdesc;
pub mod xbzrle;

mod reader;

pub use error::{Fault, WireError};

/// Size of a target page, in bytes (`PS` in the specification).
///
/// x86 has no other size.
pub const PAGE_SIZE: usize = 4096;

/// The base-2 logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Compiles the README's example as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
