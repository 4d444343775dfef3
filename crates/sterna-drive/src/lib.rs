//! Controls the migrations of one VM, or of a pair, through the monitors of QEMU and Sterna.
//!
//! A [`Vm`] is a negotiated connection with typed queries. [`Settings`] records the operator's settings, so that a job
//! that temporarily needs other capabilities can restore them. [`Temporary`] does the same for a job that changes
//! settings in several steps. [`watch`] waits for the end of a migration, shows its [`Progress`] and forwards an
//! operator's request to cancel. The jobs use these types:
//!
//! * [`readiness`]: whether a guest can leave, and whether a VM waits for one;
//! * [`agree`]: whether the settings of two monitors match;
//! * [`fork`](mod@fork): a running guest into a second VM;
//! * [`handover`]: which guest may run when one program controls both monitors;
//! * [`protect`]: additions to a QEMU that is protected by a standby;
//! * [`rdma`]: whether the settings of two monitors match for a migration over `rdma:`;
//! * [`live`]: a running guest into an image;
//! * [`save`](mod@save): a guest into an image;
//! * [`restore`](mod@restore): an image into a VM that waits for a guest;
//! * [`survey`]: measurements of a VM for a forecast;
//! * [`waiting`]: a VM that waits for the guest of a standby.
//!
//! A job that fails leaves the guest and its VM's settings unchanged, or describes the difference in one sentence.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod agree;
mod blocks;
mod convergence;
mod error;
pub mod fork;
pub mod handover;
mod launch_line;
pub mod live;
mod monitor_address;
mod pipe;
mod progress;
pub mod protect;
pub mod rdma;
pub mod readiness;
pub mod restore;
pub mod save;
mod schema;
mod settings;
mod side;
mod stall;
pub mod survey;
mod temporary;
mod vm;
mod wait;
pub mod waiting;

pub use error::DriveError;
pub use monitor_address::MonitorAddress;
use pipe::pipe;
pub use progress::{Progress, Reconnect};
pub use schema::Schema;
pub use settings::{Changed, Settings};
pub use side::Wanted;
pub use temporary::Temporary;
pub use vm::{ANSWER_LIMIT, MachineBlock, Vm};
pub use wait::{Trace, Watch, Wish, watch};

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
