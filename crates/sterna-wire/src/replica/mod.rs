//! Messages between primary and standby of a protected guest, in addition to its state (`specs/replica.md`).
//!
//! They have a separate connection, so that a heartbeat never waits for pages.
//!
//! - [`Hello`] opens the connection, and [`Welcome`] answers.
//! - Each side states its arbiter ([`ArbiterIdentity`]).
//! - Each side then sends [`Message`]s through its [`Session`], which authenticates every message.
//! - [`Output`], [`EpochSection`] and [`CheckpointSummary`] are sections of a Sterna's checkpoints.

mod arbiter;
mod authenticated;
mod epoch_section;
mod hello;
mod opening;
mod output;
mod summary;

pub use arbiter::{ArbiterIdentity, ArbiterStore};
pub use authenticated::{Message, Role, Session};
pub use epoch_section::EpochSection;
pub use hello::{Hello, Terms, Welcome};
pub use output::Output;
pub use summary::{CheckpointSummary, PageSums, SummaryDifference};
