//! Makes Markdown tables for `benches/RESULTS.md` from the results that `--json` stores.
//!
//! The column for goals is empty. The author of `RESULTS.md` fills it.

mod measured;
mod rows;

pub use measured::Measured;
pub use rows::{converge, qemu};

/// The tables, after a line with time, commit, machine and command of the measurement.
pub fn document(measured: &Measured, tables: &str) -> String {
    format!("{measured}\n\n{tables}")
}
