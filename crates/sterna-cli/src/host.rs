//! A VM in this process, as `sterna run` hosts it: machine, monitor, guest.
//!
//! - [`Machine`]: functions of a machine that only hosting needs; [`kvm`] and [`process`] implement it.
//! - [`Hosted`]: any machine, with its `quit` reported to the command that waits for it.
//! - [`GuestMonitor`]: the monitor's commands, and three of Sterna's own for the guest.

mod build;
mod config;
mod hosted;
mod kvm;
mod machine;
mod meter;
mod monitor;
mod process;
mod protection;
mod restored;
mod tide;

pub use kvm::{GuestChoice, kvm_machine, kvm_usable};
pub use monitor::{GUEST_COMMANDS, GuestMonitor};
pub use process::process_machine;
pub use protection::{Console, Protection};

pub use config::{Config, Load};
pub use hosted::Hosted;
pub use restored::{Restored, Told};

pub use machine::{Guest, GuestEnd, GuestProgress, Machine, Parts};
