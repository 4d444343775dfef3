//! Guests that make every corruption of memory visible, and the checker that proves it.
//!
//! A migration is right if the destination's memory, at the moment its guest runs, is *one consistent
//! cut* of the source's at the moment it stopped. These guests write their memory so that any other
//! outcome shows: every page says which step wrote it, and the guest's own counter says which step must
//! have. So a page that was dropped, duplicated, taken from another round or torn has words that the
//! checker did not demand.
//!
//! - [`model`]: the rules that both kinds of guest follow: steps, patterns, words, shares, fills.
//! - [`checker`]: RAM and counters in, a typed verdict out.
//! - [`process`]: threads over RAM that is tracked with userfaultfd or in software; needs no KVM.
//! - [`ledger`]: a bare-metal guest that says the same to disk, network and console, for protections.
//! - [`tide`]: the same model as a bare-metal guest for KVM, and as a 512-byte boot sector.
#![deny(unsafe_code)]

pub mod checker;
pub mod ledger;
pub mod model;
pub mod process;
pub mod tide;

pub use checker::{Verdict, Violation};
pub use model::{Fill, Pattern};
pub use process::{ProcessConfig, ProcessGuest, Tracking};
pub use tide::{Tide, TideConfig};
