//! Streams of devices with large state.

/// What is wrong with a chunk of a device's stream, or with the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadChunk {
    /// A chunk is larger than this side's buffer.
    #[error("a chunk of {bytes} bytes, but this side holds at most {most} for each device")]
    TooLarge {
        /// Size of the chunk.
        bytes: u64,
        /// Size of the buffer.
        most: u64,
    },
    /// More bytes came than this side has granted.
    #[error("{came} bytes, and {granted} were granted")]
    BeyondGrant {
        /// Bytes of the stream so far.
        came: u64,
        /// Bytes that this side has granted.
        granted: u64,
    },
    /// A large chunk of a source that does not wait for grants.
    #[error("a chunk of {bytes} bytes: at most {most} are taken from a source that was granted nothing")]
    TooLargeWithoutGrant {
        /// Size of the chunk.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A chunk with the same number came before.
    #[error("chunk {index} comes twice")]
    Twice {
        /// Number of the chunk.
        index: u32,
    },
    /// A chunk that waits for an earlier one does not fit into this side's buffer.
    #[error(
        "chunk {index} cannot be held: {held} bytes wait for chunk {next} already, and this side holds at most {most} for \
         each device"
    )]
    NoRoom {
        /// Number of the chunk.
        index: u32,
        /// Bytes in the buffer.
        held: u64,
        /// Number of the missing chunk.
        next: u32,
        /// Size of the buffer.
        most: u64,
    },
    /// More chunks than permitted wait for an earlier one.
    #[error("more than {most} chunks wait for chunk {next}")]
    TooManyWait {
        /// The limit.
        most: usize,
        /// Number of the missing chunk.
        next: u32,
    },
    /// A chunk follows the last one.
    #[error("chunk {index} comes after the end of its stream")]
    AfterEnd {
        /// Number of the chunk.
        index: u32,
    },
    /// The last chunk has a smaller number than one that came.
    #[error("its stream ends with chunk {index}, but a later one has come")]
    EarlyEnd {
        /// Number of the last chunk.
        index: u32,
    },
    /// The configuration is larger than the limit.
    #[error("a configuration of {bytes} bytes, more than {most}")]
    Configuration {
        /// Size of the configuration.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// The stream has another length than the source announced.
    #[error("its stream has {came} bytes, but {announced} were announced")]
    Total {
        /// Bytes that came.
        came: u64,
        /// Bytes that were announced.
        announced: u64,
    },
    /// No chunk came.
    #[error("the source sent no part of its stream: give both machines the same devices")]
    NoneCame,
    /// A chunk did not come.
    #[error("chunk {index} of its stream is missing, of {count}")]
    Missing {
        /// Number of the first missing chunk.
        index: u32,
        /// Number of all chunks.
        count: u64,
    },
    /// The last chunk did not come.
    #[error("the end of its stream is missing, after {count} chunks")]
    NoEnd {
        /// Number of the chunks that came.
        count: u64,
    },
}

/// Room that the destination grants to a device's stream, and that does not fit what the source sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadGrant {
    /// A grant although the devices' streams do not use grants.
    #[error("the return path carried a grant, which belongs to devices' streams")]
    NoStreams,
    /// A grant without a request.
    #[error("it grants room to device {device:?}, instance {instance}, without a request")]
    Unasked {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// After a reconnection the destination has loaded other bytes than the source has kept.
    #[error(
        "of a device's stream it has loaded {loaded} bytes, and what it may lack begins at {kept_from} \
         (specs/extension.md §8)"
    )]
    Gap {
        /// Bytes that the destination says to have loaded.
        loaded: u64,
        /// First byte that the source has kept.
        kept_from: u64,
    },
}
