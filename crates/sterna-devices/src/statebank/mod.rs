//! *statebank*: a device model whose state shows whether it was migrated intact.
//!
//! # The model
//! The state is [`StateBankConfig::state_bytes`] long, in blocks of 64 KiB. The content of a block follows
//! from the seed, its number and its *generation*, which counts the device's changes to the block
//! ([`content`]). The device therefore stores only generations. A block with bytes of another block or of two
//! generations is detected at its first wrong byte. While the device runs it changes blocks at a configured
//! rate.
//!
//! A saved state is a stream of numbered records ([`stream`]). It begins with the device's properties. Blocks
//! with their generations follow. The end has the digest of all generations. A part of the blocks can be read
//! while the device runs. Blocks that change after they were read are sent again. The loader checks that
//! record numbers are in order, that every byte is correct, and that every block arrived in its last
//! generation.
//!
//! The device also writes guest RAM by DMA until it is stopped, and counts these writes ([`dma`]). Before a
//! loaded device runs, it checks that RAM contains the last write to each page.
//!
//! [`StateBank`] can be used in three ways, with the same rates and [faults](Fault):
//!
//! - behind a vfio-user server in another process (`sterna-statebank`)
//! - behind a vfio-user server on a thread ([`StateBank::serve`])
//! - directly as a [`crate::vfio::MigrationPort`], without a protocol

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
