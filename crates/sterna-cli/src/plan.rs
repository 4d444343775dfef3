//! A plan: the inputs of a forecast, the rules for a constant dirty rate, and the expected course.
//!
//! - [`live`]: reads the values from a VM, Sterna's or QEMU's.
//! - [`table`]: the plan for a terminal.
//! - [`picture`]: the plan as a picture.
//!
//! The plan is one JSON object, like a migration's record ([`crate::record`]). `schema` and `version`
//! identify it, times are seconds, rates bytes per second.

mod format;
mod link;
pub mod live;
mod measured;
mod picture;
mod table;

pub use format::{Plan, SCHEMA, VERSION};
pub use measured::Measured;
pub use picture::picture;
pub use table::table;

#[cfg(test)]
mod tests;
