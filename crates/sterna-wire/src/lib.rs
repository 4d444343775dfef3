//! Bytes to values and back, for every message that a Sterna sends or receives.
//!
//! Slices go in, values come out. Nothing here reads a socket or a clock, contains `unsafe`, or allocates by a
//! length of the peer that was not checked against [`limits`]. A decoder with too few bytes returns `Ok(None)` or
//! [`main::Step::NeedMore`]; one with wrong bytes returns a [`WireError`], which names the byte, the rule, the
//! paragraph and whose fault it is.
//!
//! | module | what |
//! | --- | --- |
//! | [`main`] | the main channel: header, configuration, sections, commands, the incremental decoder |
//! | [`nbd`] | a guest's disk, as a standby serves it |
//! | [`ram`] | records inside the RAM section: words, block list, writers |
//! | [`multifd`] | the channels beside it: initial packet, RAM packets, device-state packets |
//! | [`rdma`] | private data and control messages of the transport `rdma:` |
//! | [`replica`] | what primary and standby of a protected guest say beside its state |
//! | [`return_path`] | what the destination says back |
//! | [`received_pages`] | which pages a destination has, as it says after a broken postcopy |
//! | [`xbzrle`] | pages sent as a difference to their older content |
//! | [`vmdesc`] | the JSON after the end of the stream, which gives device bodies their lengths |
//! | [`global_state`] | the run state that the guest had |
//! | [`mapped_ram`] | where pages lie in a file |
//! | [`colo`] | checkpoints behind the end of a migration: messages, their order, device state |
//! | [`libvirt`] | the header of libvirt's save images |
//! | [`extension`] | what two Sternas say to each other beyond QEMU's format |
//!
//! Paragraph numbers in docs and errors are those of `specs/` in the project's repository.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]
// The module `main` is the main channel, not the root of a program.
#![allow(special_module_name)]

pub mod colo;
pub mod error;
pub mod extension;
pub mod global_state;
pub mod libvirt;
pub mod limits;
pub mod main;
pub mod mapped_ram;
pub mod multifd;
pub mod nbd;
pub mod ram;
pub mod rdma;
pub mod received_pages;
pub mod replica;
pub mod return_path;
pub mod vmdesc;
pub mod xbzrle;

mod reader;

pub use error::{Fault, WireError};

/// Size of a target page in bytes (`PS` in the specification); x86 has no other.
pub const PAGE_SIZE: usize = 4096;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
