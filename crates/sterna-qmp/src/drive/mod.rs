//! Driving the migrations of one VM, or of a pair, through their monitors: QEMU's and Sterna's alike.
//!
//! A [`Vm`] is a negotiated connection with typed questions. [`Settings`] remembers what an operator had set,
//! so that a driver that needs other capabilities for a while puts everything back. [`watch`] waits for a
//! migration's end, shows its [`Progress`] and passes on an operator's wish to cancel. On these stand the
//! jobs:
//!
//! * [`handover`]: which guest may run when two monitors are in hand;
//! * [`protect`]: what a QEMU needs beside it to be protected by a standby;
//! * [`rdma`]: whether two monitors' settings match for a migration over `rdma:`;
//! * [`save`](mod@save): a guest into an image;
//! * [`restore`](mod@restore): an image into a VM that waits for a guest;
//! * [`survey`]: what a forecast must know of a VM;
//! * [`waiting`]: a VM that waits for the guest of a standby.
//!
//! A job that fails leaves the guest and its VM's settings as they were, or says in one sentence what is
//! different.

mod error;
pub mod handover;
mod launch_line;
mod pipe;
mod progress;
pub mod protect;
pub mod rdma;
pub mod restore;
pub mod save;
mod settings;
pub mod survey;
mod vm;
mod wait;
pub mod waiting;

pub use error::DriveError;
use pipe::pipe;
pub use progress::{Progress, Reconnect};
pub use settings::{Changed, Settings};
pub use vm::{ANSWER_LIMIT, MachineBlock, Vm};
pub use wait::{Trace, Watch, Wish, watch};
