//! Why the guest's memory cannot be handed to another process of this host.

use std::sync::Arc;

use sterna_ram::RamError;

/// A property of this side's guest because of which its memory cannot move as descriptors.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Unsharable {
    /// A device keeps this process's memory mapped.
    #[error(
        "{device} has the guest's memory mapped and cannot follow it into another process: take it off the guest, or set mode \
         to normal"
    )]
    MappedByDevice {
        /// Name of the device.
        device: String,
    },
    /// Memory of a block has no descriptor that another process can map. The error names the block and the remedy.
    #[error("{0}")]
    Block(#[source] Arc<RamError>),
    /// The guest has more blocks than one message carries descriptors.
    #[error("the guest has {blocks} RAM blocks, and at most {most} can be handed over: set mode to normal")]
    TooManyBlocks {
        /// Number of blocks.
        blocks: usize,
        /// The limit.
        most: usize,
    },
}
