//! What a side waited for when a time limit passed.

use sterna_proto::{destination, source};

/// What the peer did not do within a time limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Awaited {
    /// A SYNC packet that a flush has announced.
    #[error("SYNC number {number} on multifd channel {channel}")]
    Sync {
        /// Number of the packet.
        number: u64,
        /// Number of the channel.
        channel: usize,
    },
    /// The rest of a device's stream.
    #[error("the stream of device {device:?}, instance {instance} to be loaded")]
    DeviceStream {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// The channels of a migration.
    #[error(
        "all channels; only {peer} connected, {missing} did not connect: use multifd on both sides or on neither, with the \
         same number of channels"
    )]
    Channels {
        /// Address of the source.
        peer: String,
        /// The missing channels.
        missing: String,
    },
    /// The channel of requested pages in postcopy.
    #[error("the preempt channel: set postcopy-preempt alike on both sides")]
    PreemptChannel,
    /// The source's first element.
    #[error("the start of loading")]
    Loading,
    /// The end of a destination's state.
    #[error("the end of {0:?}")]
    Destination(destination::State),
    /// The end of a source's state.
    #[error("the end of {0:?}")]
    Source(source::State),
    /// The end of a stream with unknown devices.
    #[error("the end of the devices' state, or the description after it")]
    Description,
    /// The destination's promise to wait for a lost connection.
    #[error("the destination to say that it waits for a lost connection")]
    Promise,
    /// The destination's readiness to take memory as descriptors.
    #[error("the destination to wait for the guest's memory")]
    Memory,
    /// The first answer of the destination of a served image.
    #[error("the destination to answer")]
    Answer,
    /// The answer to the list of RAM blocks.
    #[error("the destination to accept the machine's memory")]
    Blocks,
    /// The devices of a served image.
    #[error("the destination to load the devices")]
    Devices,
    /// The pages that a destination requested at the end of serving.
    #[error("the last requested pages to be written")]
    RequestedPages,
    /// The end of serving.
    #[error("the destination to confirm the end")]
    Confirmation,
    /// The received pages of a recovery.
    #[error("the destination to say which pages it has")]
    ReceivedPages,
    /// The end of a recovery.
    #[error("the destination to continue")]
    Recovery,
}
