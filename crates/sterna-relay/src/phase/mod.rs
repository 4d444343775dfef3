//! How far a migration is, and what happens to its VMMs when the relays cannot reach each other any more.
//!
//! [`StreamReader`] reads a QEMU's main channel while it passes, [`ReturnReader`] the return path. [`SourceKeeper`]
//! and [`DestinationKeeper`] decide, from that and from the carriers, whether a relay may close its VMM's
//! connections (`specs/relay.md §9`). All of them are pure: they do no I/O and read no clock.

mod control;
mod end_scan;
mod keeper;
mod kind;
mod multifd_pages;
mod progress;
mod reader;
mod return_reader;

pub use control::{Control, PONG, is_control};
pub use keeper::{Closing, DestinationKeeper, Heard, SourceKeeper, StreamState};
pub use kind::StreamKind;
pub use multifd_pages::MultifdPages;
pub use progress::RamProgress;
pub use reader::{Phase, StreamReader, Unconfirmed};
pub use return_reader::ReturnReader;
