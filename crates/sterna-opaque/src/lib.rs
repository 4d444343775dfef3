//! Opaque machines: guests of another VMM (QEMU), which are received into images and sent from images.
//!
//! RAM is sent and received as in any migration. The engine does not know the state of the machine's devices. It
//! keeps that state byte for byte in a [`sterna_image::Shape`], and sends it back unchanged. Therefore an opaque
//! machine never runs here: it is in an image, or in memory.
//!
//! - [`receive`] waits at an address for any source (a QEMU's `migrate`, a Sterna) and writes an image. The machine's
//!   RAM blocks are known only when the stream lists them. Loader, lanes, rounds and the handover are shared with
//!   [`sterna::Incoming`]. The source receives its success (the answer to *prepare*, SHUT 0) only when the image is
//!   durable. Until then, after every failure the source's guest continues to run, and no image remains.
//! - [`MemoryMachine`] is a machine whose RAM is memory of this process. It arrives from a source and is sent on,
//!   without an image in between. RDMA requires this form, because the peer writes into memory.
//! - [`send`] is the way back: the image is the source of a paused guest, which is sent to a QEMU that waits with
//!   `-incoming`, or to a Sterna. Rounds, lanes and the handover are shared with [`sterna::Migration`].
//! - [`serve`] starts a guest out of an image before its pages have arrived: it sends pages that the guest touches
//!   first (postcopy).
//!
//! | module | contains |
//! | --- | --- |
//! | `gathered` | the machine's description, collected as its stream arrives |
//! | `image_plan` | place, options and form of an image |
//! | `image_target` | receives a guest into an image: configuration, block list, sections, the tail |
//! | `lane` | writes received pages to the image |
//! | `machine` | an opaque machine as the source of a migration |
//! | `memory`, `memory_target` | a machine in memory, and its reception |
//! | `receive` | the handle of a reception |
//! | `stored` | a machine in an image, as the source of a migration |
//! | `window` | the buffer through which a sending lane reads the image |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod failure;
mod gathered;
mod image_plan;
mod image_target;
#[doc(hidden)]
pub mod internals;
mod lane;
mod machine;
mod memory;
mod memory_target;
mod receive;
mod send;
pub mod serve;
mod stored;
mod window;

pub use image_plan::{ImagePlan, RAM_BYTES};
pub use memory::MemoryMachine;
pub use receive::{Receiving, Stored, receive};
pub use send::{SendOptions, send};

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
