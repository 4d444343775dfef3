//! The main channel (`specs/stream.md §1`).
//!
//! ```text
//! header, configuration | element, element, … | EOF | description
//! ```
//!
//! An element is a command or a section. A section has a header, a body and a footer; a body has no length, and
//! only who knows the device knows where it ends. [`MainDecoder`] therefore asks its caller's
//! [`SectionKnowledge`] how the body of each section is delimited, reads RAM sections itself record by record,
//! and hands everything over as [`MainItem`]s. It holds no more than the section that it is in the middle of.
//!
//! A COLO primary sends more behind the description: [`MainDecoder::begin_checkpoint`] reads the RAM of its checkpoints.
//!
//! The encoding side is a handful of functions that append to a buffer: [`FileHeader`], [`Configuration`],
//! [`SectionHeader`], [`Command`], [`encode_footer`], [`encode_end`].

mod command;
mod configuration;
mod decoder;
mod element;
mod expect;
mod footer;
mod item;
mod tail;
mod walk;

pub use command::Command;
pub use configuration::{Configuration, FileHeader};
pub use decoder::MainDecoder;
pub use element::{
    SectionHeader, SectionKind, encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
pub use expect::{BodyKind, Expectations, SectionKnowledge};
pub use item::{MainItem, Step};
pub use tail::{Tail, TailEnd};
pub(crate) use walk::{full_section, sections};
