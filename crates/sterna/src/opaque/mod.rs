//! Opaque machines: a guest of another VMM (QEMU's) is received into an image, and an image is sent as a stream.
//!
//! RAM moves as in any migration. The engine does not know the state of the machine's devices: it keeps that byte for
//! byte in a [`sterna_image::Shape`], and sends it back unchanged. So an opaque machine never runs here: it is in an
//! image.
//!
//! - [`receive`] waits at an address for any source (a QEMU's `migrate`, a Sterna) and writes an image. The
//!   machine's RAM blocks are known only when the stream lists them; loader, lanes, rounds and the handover are
//!   those of [`crate::Incoming`]. The source is told that all is well (the answer to *prepare*, SHUT 0) only when
//!   the image is durable; until then every failure lets the source's guest run on and leaves no image.
//! - [`send`] is the way back: the image is the source of a paused guest, sent to a QEMU that waits with
//!   `-incoming`, or to a Sterna. Rounds, lanes and the handover are those of [`crate::Migration`].
//!
//! | module | contains |
//! | --- | --- |
//! | `image_target` | receives a guest into an image: configuration, block list, sections, the tail |
//! | `lane` | pages on their way into the image |
//! | `receive` | the handle of a reception |
//! | `stored` | a machine in an image, as the source of a migration |
//! | `window` | one sending lane's window onto the image |

mod image_plan;
mod image_target;
mod lane;
mod receive;
mod send;
mod stored;
mod window;

pub use image_plan::{ImagePlan, RAM_BYTES};
pub use receive::{Receiving, Stored, receive};
pub use send::{SendOptions, send};
