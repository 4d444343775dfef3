//! Writing pages to a mapped-ram file: every page at a fixed place, without packets (specs/mapped-ram.md §4).

mod mapped;
mod writer;

pub(crate) use mapped::MappedFile;
pub(crate) use writer::FileWriter;
