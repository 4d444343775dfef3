//! Images served to QEMUs, or to other programs that load as QEMU does (specs/postcopy.md).
//!
//! The guest runs at its destination while pages are missing. [`ServedImage`] gives random access to the pages of an
//! image. Each [`Serving`] sends one destination the devices first, which starts the guest. Then it sends requested
//! pages on demand, and all others in the background. A connection that breaks can be replaced: the destination then
//! reports which pages it has.
//!
//! | module | contains |
//! | --- | --- |
//! | `commands` | the selection of the image's own commands. Pure |
//! | `stream`, `records` | the encoded stream: everything except pages, and pages |
//! | `store`, `cache`, `served` | random access to an image's pages, in bounded memory, for all destinations |
//! | `link`, `reception` | outgoing connections, first and after a loss; destinations that connect to this side |
//! | `shared`, `listener`, `sender`, `serving` | the threads of one destination |
//! | `statistics` | the progress of one destination |

mod cache;
mod commands;
mod link;
mod listener;
mod reception;
mod records;
mod sender;
mod served;
mod serving;
mod shared;
mod statistics;
mod store;
mod stream;

pub use link::{Accepted, Dial, Link, Purpose};
pub use reception::Reception;
pub use served::{ImageOptions, ServedImage};
pub use serving::{GuestState, ServeFailure, ServeOptions, Serving};
pub use statistics::{ServeStatistics, Silence, Stage};
pub use store::Access;
