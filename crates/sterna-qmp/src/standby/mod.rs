//! The monitor of a standby. It reports the protection of the guest, and starts a takeover by an operator's command.
//!
//! [`COMMANDS`] lists the commands. [`StandbyReport`] is the answer to `x-sterna-query-protection`.

mod monitor;
mod report;

pub use monitor::{COMMANDS, StandbyControl, StandbyMonitor, Takeover};
pub use report::StandbyReport;
