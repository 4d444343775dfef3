//! A standby's monitor: how its guest is protected, and the operator's word to take it over.
//!
//! | command | does |
//! | --- | --- |
//! | `query-colo-status`, `query-migrate`, `query-status` | as a QEMU that is a secondary |
//! | `x-colo-lost-heartbeat` | an unplanned takeover. It forces nothing: the claim and the fence decide |
//! | `x-sterna-takeover` | the same, or planned, or the step that failed once more |
//! | `x-sterna-query-protection` | all that is known ([`StandbyReport`]) |
//! | `quit` | as Ctrl-C |

mod monitor;
mod report;

pub use monitor::{StandbyControl, StandbyMonitor, Takeover};
pub use report::StandbyReport;
