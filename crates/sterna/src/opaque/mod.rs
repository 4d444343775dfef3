//! Opaque machines: a guest of another VMM (QEMU's) is received into an image, and an image is sent as a stream.
//!
//! RAM moves as in any migration. The engine does not know the state of the machine's devices: it keeps that byte for
//! byte in a [`sterna_image::Shape`], and sends it back unchanged. So an opaque machine never runs here: it is in an
//! image, or in memory.
//!
//! - [`receive`] waits at an address for any source (a QEMU's `migrate`, a Sterna) and writes an image. The
//!   machine's RAM blocks are known only when the stream lists them; loader, lanes, rounds and the handover are
//!   those of [`crate::Incoming`]. The source is told that all is well (the answer to *prepare*, SHUT 0) only when
//!   the image is durable; until then every failure lets the source's guest run on and leaves no image.
//! - [`MemoryMachine`] is a machine whose RAM is memory of this process: it comes from a source and is sent on, without an
//!   image in between. Over RDMA there is no other way, as a peer writes into memory then.
//! - [`send`] is the way back: the image is the source of a paused guest, sent to a QEMU that waits with
//!   `-incoming`, or to a Sterna. Rounds, lanes and the handover are those of [`crate::Migration`].
//!
//! | module | contains |
//! | --- | --- |
//! | `gathered` | what a stream says of its machine, gathered as it comes |
//! | `image_target` | receives a guest into an image: configuration, block list, sections, the tail |
//! | `lane` | pages on their way into the image |
//! | `machine` | an opaque machine as the source of a migration |
//! | `memory`, `memory_target` | a machine in memory, and how it comes there |
//! | `receive` | the handle of a reception |
//! | `stored` | a machine in an image, as the source of a migration |
//! | `window` | one sending lane's window onto the image |

pub(crate) mod gathered;
mod image_plan;
mod image_target;
mod lane;
mod machine;
mod memory;
mod memory_target;
mod receive;
mod send;
mod stored;
mod window;

pub use image_plan::{ImagePlan, RAM_BYTES};
pub use memory::MemoryMachine;
pub use receive::{Receiving, Stored, receive};
pub use send::{SendOptions, send};
