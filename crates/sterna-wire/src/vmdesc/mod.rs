//! The JSON after the end of the stream (`specs/stream.md §1.6`).
//!
//! It names every FULL section in stream order and the size of each of its fields. QEMU wants it there and does
//! not look into it; for a reader that keeps device state as opaque bytes it is what gives the bodies a length.
//!
//! # What a description may be
//! Any bytes, at most [`VM_DESCRIPTION_BYTES`](crate::limits::VM_DESCRIPTION_BYTES): no byte of it makes a stream unsound,
//! because a loader drops it unread. So readers keep it as it is, and [`encode`] gives it back so. Whether it can be used is
//! for [`parse`] to say: JSON in UTF-8 with an object at its top. One that cannot be used is damaged; then sections are
//! found by their footers. [`build`] writes ASCII, as QEMU does.

mod build;
mod json;
mod parse;

pub use build::{Device, Field, build, build_for, encode};
pub use parse::{SectionLength, parse, section_lengths};
