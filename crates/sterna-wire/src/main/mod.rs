//! The main channel: headers, sections and commands (`specs/stream.md §1`).
//!
//! ```text
//! header, configuration | element, element, … | EOF | description
//! ```
//!
//! An element is a command or a section. A section has a header, a body and a footer. A body has no length, so
//! that only a reader who knows the device can find its end. [`MainDecoder`] therefore asks its caller's
//! [`SectionKnowledge`] for the end of each body. It reads RAM sections itself, record by record, and returns
//! everything as [`MainItem`]s. It stores at most the section that it is reading.
//!
//! A COLO primary sends checkpoints after the description. [`MainDecoder::begin_checkpoint`] reads their RAM.
//!
//! The encoders are functions that append to a buffer: [`FileHeader`], [`Configuration`], [`SectionHeader`],
//! [`Command`], [`encode_footer`], [`encode_end`].

mod command;
pub(crate) mod configuration;
mod decoder;
mod element;
mod expect;
mod footer;
mod item;
mod tail;
mod walk;
#[cfg(feature = "standby")]
mod whole_sections;

pub use command::Command;
pub use configuration::{Configuration, FileHeader};
pub use decoder::MainDecoder;
pub use element::{
    SectionHeader, SectionKind, encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
pub use expect::{BodyKind, Expectations, SectionKnowledge};
pub use item::{MainItem, Step};
pub use tail::{Tail, TailEnd};
#[cfg(feature = "standby")]
pub(crate) use walk::full_section;
#[cfg(feature = "standby")]
pub(crate) use whole_sections::sections;
