//! The primary's side of a protection whose primary is an unmodified QEMU (`specs/colo.md`, `specs/replica.md`).
//!
//! This program stands beside QEMU. QEMU's stream goes through it to the standby ([`relay`]), and so does all that the guest's network
//! cards say ([`OutputGate`], at each card). The contact's machine decides who may run the guest and what may leave; [`guard`] does what it
//! says. [`QemuProtection`] begins all of it and puts everything back in the end.
//!
//! Numbers: checkpoint *n* is the *n*th that QEMU takes after the seeding, which is none. Epoch *n* of the machine ends with it. A gate
//! counts from the seeding, so what the machine calls epoch *n* is a gate's *n* + 1.
//!
//! | module | contains |
//! | --- | --- |
//! | `session` | the handle: begin, look, end |
//! | `request`, `check` | what is asked for, and whether QEMU can be protected |
//! | `relay`, `answers` | the stream, and what the standby says in it |
//! | `guard` | what the contact's machine does to QEMU |
//! | `disks` | disks that QEMU writes at the standby, too |
//! | `gates`, `gate`, `nics`, `names` | the output |
//! | `monitor`, `sockets` | the monitor that threads share, and the sockets' directory |

mod answers;
mod check;
mod disks;
mod gate;
mod gates;
mod guard;
mod monitor;
mod names;
mod nics;
mod relay;
mod request;
mod session;
mod sockets;

pub use gate::{GateStatistics, OutputGate};
pub use request::{DiskCopy, ProtectRequest, ProtectedDisk};
pub use session::{ProtectionEnd, ProtectionStatistics, QemuProtection};
