//! Tables in Markdown as `benches/RESULTS.md` has them, out of what `--json` stores.
//!
//! A table's goals are for whoever puts it there: the column is empty.

mod measured;
mod rows;

pub use measured::Measured;
pub use rows::{converge, qemu};

/// The tables with the line that says when, of what, where and how they were measured.
pub fn document(measured: &Measured, tables: &str) -> String {
    format!("{measured}\n\n{tables}")
}
