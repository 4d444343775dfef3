//! Devices, firmware and RAM.

use crate::error::lower::VmError;

/// A property that both machines must have.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MachineDifference {
    /// The source sends no compatibility record, which this machine compares before any RAM moves.
    #[error(
        "the source sent no compatibility record, and this machine compares before any RAM moves: migrate from a machine of \
         the same kind"
    )]
    NoRecord,
    /// The machine refuses the source's compatibility record.
    #[error("{0}")]
    Record(#[source] VmError),
    /// A device of this machine has no state in the stream.
    #[error(
        "the source sent no state of device {device:?}, instance {instance}: give both machines the same devices"
    )]
    NoState {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// The source streams the state of a device that this machine lacks.
    #[error(
        "a chunk of the state of device {device:?}, instance {instance}: no device here accepts it in that way; give both \
         machines the same devices"
    )]
    NoStreamHere {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// The destination waits for the stream of a device that this machine lacks.
    #[error(
        "the destination has a device {device:?}, instance {instance}, with large state, but this side has not: give both \
         machines the same devices"
    )]
    StreamOnlyThere {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// The destination lacks a device whose state this machine streams.
    #[error(
        "the destination has no counterpart with large state for device {device:?}, instance {instance}: give both machines \
         the same devices"
    )]
    StreamOnlyHere {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// Pages of other sizes, with postcopy.
    #[error(
        "the source's memory has pages of {host:#x} bytes (all sizes together) and {target:#x} in the stream, this side's of \
         {ours:#x} and {ours_target:#x}: postcopy needs the same kind of memory on both sides"
    )]
    PageSizes {
        /// Page sizes of the source's blocks in bytes, combined by OR.
        host: u64,
        /// Page size of the source's stream in bytes.
        target: u64,
        /// Page sizes of this side's blocks in bytes, combined by OR.
        ours: u64,
        /// Page size of this side's stream in bytes.
        ours_target: u64,
    },
    /// A block that is read-only here has another content at the source.
    #[error(
        "RAM block {block:?} is mapped read-only here, but differs from the source's at byte {offset:#x}: give both sides the \
         same content (firmware), or map it writable"
    )]
    ReadOnlyBlock {
        /// Name of the block.
        block: String,
        /// First byte that differs.
        offset: u64,
    },
    /// More RAM than an image or a standby accepts.
    #[error("the source's RAM is larger than {most} bytes, the most that is accepted")]
    TooMuchRam {
        /// The limit.
        most: u64,
    },
    /// More device state than an image or a standby accepts.
    #[error("{bytes} bytes of device state in one place, more than {most}")]
    TooMuchState {
        /// Length of the state.
        bytes: usize,
        /// The limit.
        most: usize,
    },
}
