//! The primary's side of a protection whose primary is an unmodified QEMU (`specs/colo.md`, `specs/replica.md`).
//!
//! This program runs next to QEMU. QEMU's stream passes through it to the standby ([`relay`]), and so does the output
//! of the guest's network cards ([`OutputGate`], one for each card). The contact's state machine decides who may run
//! the guest and which output may leave. [`guard`] performs its actions. [`QemuProtection`] starts all of it, and
//! restores QEMU at the end.
//!
//! Numbers: checkpoint *n* is the *n*th that QEMU takes after the seeding, which does not count. The machine's epoch
//! *n* ends with it. A gate counts from the seeding, so the machine's epoch *n* is a gate's epoch *n* + 1.
//!
//! | module | contains |
//! | --- | --- |
//! | `session` | the handle: begin, query, end |
//! | `request`, `check` | the request, and the check whether QEMU can be protected |
//! | `relay`, `answers` | the stream, the standby's messages, and checkpoints that wait in memory |
//! | `guard`, `leave`, `debugger` | the machine's actions; leaving COLO; starting a guest that `cont` cannot start |
//! | `left` | the remains of a protection in QEMU after its program was killed |
//! | `disks` | disks that QEMU also writes at the standby |
//! | `gates`, `gate`, `nics`, `names` | the output of the network cards |
//! | `monitor`, `sockets` | the monitor that threads share, and the sockets' directory |

mod answers;
mod ask;
mod check;
mod debugger;
mod disks;
mod gate;
mod gates;
mod guard;
mod leave;
mod left;
mod monitor;
mod names;
mod nics;
mod quorum;
mod relay;
mod request;
mod session;
mod sockets;

pub use gate::{GateStatistics, OutputGate};
pub use left::{LeftProtection, LeftRemoved};
pub use request::{DiskCopy, ProtectRequest, ProtectedDisk};
pub use session::{ProtectionEnd, ProtectionStatistics, QemuProtection};
