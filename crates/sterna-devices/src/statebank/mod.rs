//! *statebank*: a device model whose state proves what became of it.
//!
//! # The model
//! The state is [`StateBankConfig::state_bytes`] long, in blocks of 64 KiB. What a block holds follows from the seed,
//! its number and its *generation*, which counts how often the device has changed it ([`content`]); so nothing need
//! be remembered but generations, and a block that comes with another's bytes, or with bytes of two generations, is
//! seen at its first wrong byte. While the device runs it changes blocks at a given rate.
//!
//! Saved, the state is a stream of numbered records ([`stream`]): what the device is, then blocks, each with its
//! generation, then an end that has the digest of all generations. A part of the blocks can be read while the device
//! runs; what changed after it was read comes again. The loader takes nothing on trust: numbers in order, every byte
//! what it must be, every block there in its last generation.
//!
//! It also writes guest RAM by DMA until it is stopped ([`dma`]), and remembers what: a device that was loaded looks
//! whether the last write to each page has arrived with the RAM, before it runs.
//!
//! [`StateBank`] is used in three ways: behind a vfio-user server in a process of its own (`sterna-statebank`), behind
//! one on a thread ([`StateBank::serve`]), or directly as a [`crate::vfio::MigrationPort`], without any protocol.
//! Each has the same rates and [faults](Fault).

mod bank;
mod config;
pub mod content;
pub mod dma;
mod fault;
mod load;
mod pace;
mod save;
mod serve;
mod status;
pub mod stream;

pub use bank::StateBank;
pub use config::StateBankConfig;
pub use fault::{Fault, FaultKind};
pub use load::LoadError;
pub use pace::Pace;
pub use serve::BankServer;
pub use status::{STATUS_REGION, Status, Verdict};
