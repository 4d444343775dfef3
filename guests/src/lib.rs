//! Guests that make every corruption of memory visible, and the checker that proves it.
//!
//! A migration is correct if the destination's memory, when its guest starts, is *one consistent cut* of
//! the source's memory when it stopped. These guests write their memory so that every other result is
//! detected. Every page shows which step wrote it, and the guest's own counter shows which step must have
//! written it. A page that was dropped, duplicated, torn or taken from another round therefore has words
//! that the checker does not expect.
//!
//! - [`model`]: the rules that all these guests follow: steps, patterns, words, shares, fills.
//! - [`checker`]: computes a typed verdict from RAM and counters.
//! - [`process`]: a guest of threads over RAM, tracked with userfaultfd or in software; needs no KVM.
//! - [`ledger`]: a bare-metal guest that outputs the same records to disk, network and console, for
//!   protections.
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
