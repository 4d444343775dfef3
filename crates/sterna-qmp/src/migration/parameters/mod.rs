//! Migration parameters under QEMU's names.
//!
//! [`PARAMETERS`] declares each one once. The checks, the conversion to the engine's types, `migrate-set-parameters`,
//! `query-migrate-parameters`, the schema, the human monitor's output and docs/qmp.md follow from it (specs/stream.md §4, §8).

mod set;
mod spec;
mod table;
mod typed;

pub use set::ParameterSet;
pub use spec::{Change, ParameterSpec, Range, Unit};
pub(super) use table::{ANSWER, ARGUMENTS};
pub use table::{PARAMETERS, parameter};
pub(super) use typed::{Checkpoints, Mode, TlsNames, Typed};
