//! The JSON after the end of the stream (`specs/stream.md §1.6`).
//!
//! It names every FULL section in stream order and the size of each of its fields. QEMU wants it there and does
//! not look into it; for a reader that keeps device state as opaque bytes it is what gives the bodies a length.

mod build;
mod json;
mod parse;

pub use build::{Device, Field, build, build_for, encode};
pub use parse::{SectionLength, parse, section_lengths};
