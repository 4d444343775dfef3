//! Pages in a mapped-ram file: every page at its place, no packets (specs/mapped-ram.md §4).

mod mapped;
mod writer;

pub(crate) use mapped::MappedFile;
pub(crate) use writer::FileWriter;
