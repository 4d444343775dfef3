//! Decides which of two sides may run a protected guest.
//!
//! The decision is needed when the two sides cannot reach each other.
//!
//! A protection of a guest has *generations*. In each generation, the primary and the standby may ask an
//! [`Arbiter`] for the exclusive [`Claim`]. The first claim wins, and this never changes. Only [`Ruling::Won`]
//! permits a side to start the guest. [`Ruling::Lost`] is final. A side that got a [`ClaimError`] must not
//! start the guest.
//!
//! ```
//! use std::time::Duration;
//! use sterna_arbiter::{Claim, Claimant, Generation, GuestName, Role, Ruling, Spec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = std::env::temp_dir().join(format!("sterna-arbiter-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory)?;
//! let spec: Spec = format!("file:{}", directory.display()).parse()?;
//! let opened = spec.open(Duration::from_secs(10))?;
//! let claim = Claim {
//!     guest: GuestName::new("web-1")?,
//!     generation: Generation::new(1),
//!     claimant: Claimant::of_this_process(Role::Standby),
//! };
//! assert_eq!(opened.arbiter.claim(&claim)?, Ruling::Won);
//! // Asking again is safe: the first answer may have been lost.
//! assert_eq!(opened.arbiter.claim(&claim)?, Ruling::Won);
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Kinds
//! [`Spec`] is the text by which an operator selects the arbiter: `etcd:`, `file:`, `exec:` or `ask`.
//! [`Spec::open`] wraps each kind in a [`Watched`], which applies the time limit and remembers rulings. Once an
//! arbiter has contradicted itself, its later answers are errors.
//!
//! # One arbiter
//! If the two sides asked different arbiters, both could win. Examples are two directories with the same name
//! on two hosts, or two clusters. Therefore, the two sides compare [`Arbiter::identity`] when a protection
//! starts.
//!
//! # Fences
//! A [`Fence`] runs a command that makes sure that the other side does not run.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod arbiter;
mod ask;
mod claim;
mod command;
mod error;
mod etcd;
mod exec;
mod fence;
mod file;
mod names;
mod record;
mod spec;
mod watched;

pub use arbiter::{Arbiter, Identity, Ruling};
pub use ask::{NotDecided, Operator};
pub use claim::{Claim, Claimant, Generation, GuestName, NameError, Role};
pub use command::{CommandLine, CommandLineError};
pub use error::ClaimError;
pub use fence::{Fence, FenceError};
pub use spec::{Opened, Spec, SpecError};
pub use watched::Watched;

/// Default limit for a call of an arbiter or a fence: 10 s.
pub const DEFAULT_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);
