//! The description: the JSON after the end of the stream (`specs/stream.md §1.6`).
//!
//! It names every FULL section in stream order, and the size of each field. QEMU requires a description but
//! ignores its content. A reader that keeps device state as opaque bytes needs it for the lengths of the
//! bodies.
//!
//! # Valid descriptions
//! A description may have any bytes, at most [`VM_DESCRIPTION_BYTES`](crate::limits::VM_DESCRIPTION_BYTES). Its
//! content cannot make a stream invalid, because a loader ignores it. Readers therefore keep it unchanged, and
//! [`encode`] writes it back unchanged.
//!
//! [`parse`] decides whether a description is usable: it must be JSON in UTF-8 with an object at its top. An
//! unusable one is damaged, and sections are then found by their footers. [`build`] writes ASCII, as QEMU does.

mod build;
mod json;
mod parse;

pub use build::{Device, Field, build, build_for, encode};
pub use parse::{SectionLength, parse, section_lengths};
