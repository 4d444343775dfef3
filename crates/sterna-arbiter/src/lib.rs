//! Which of two sides may run a protected guest when they cannot reach each other.
//!
//! A protection of a guest has *generations*. In each, the primary and the standby may ask an [`Arbiter`] for the exclusive
//! [`Claim`]. The first one wins, for ever. Every other answer than [`Ruling::Won`] starts nothing: [`Ruling::Lost`] is
//! final, and after a [`ClaimError`] nobody may start.
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
//! [`Spec`] is the text by which an operator chooses: `etcd:`, `file:`, `exec:` or `ask`. [`Spec::open`] puts each kind behind a
//! [`Watched`], which keeps the time limit and remembers rulings: an arbiter that contradicts itself is believed no more.
//!
//! # One arbiter
//! Two sides that ask two arbiters could both win: two directories of one name on two hosts, say, or two clusters. At the start
//! of a protection the two sides compare [`Arbiter::identity`].
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

/// How long a call of an arbiter, or a fence, may take if nothing else is wanted.
pub const DEFAULT_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);
