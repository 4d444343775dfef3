//! Checkpoints, and other messages between a primary and its standby.

use crate::error::lower::VmError;

/// A message of a primary or of its standby that breaks a rule.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BadProtection {
    /// The standby sends messages without questions.
    #[error("the standby said {most} messages that were not due")]
    TooManyMessages {
        /// The limit.
        most: usize,
    },
    /// The standby's message is not the one that the primary waits for.
    #[error("the standby said {came}, and {due} was due (specs/colo.md §3)")]
    OtherMessage {
        /// The message.
        came: sterna_wire::colo::MessageKind,
        /// The message that was due.
        due: sterna_wire::colo::MessageKind,
    },
    /// A section follows the checkpoint's summary.
    #[error("checkpoint {number}: section {section:?} is not the last one (specs/replica.md §7)")]
    SummaryNotLast {
        /// Number of the checkpoint.
        number: u64,
        /// Name of the summary's section.
        section: &'static str,
    },
    /// The standby's VMM refuses what a checkpoint brings of a device's stream.
    #[error("what a checkpoint brings of device {device:?}, instance {instance}: {why}")]
    Epoch {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
        /// The VMM's reason.
        #[source]
        why: VmError,
    },
    /// A device's stream begins a second time.
    #[error("the stream of device {device:?}, instance {instance}, begins twice")]
    StreamTwice {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// A device's stream did not end in the seeding.
    #[error("the stream of device {device:?}, instance {instance}, has no end (specs/replica.md §5)")]
    StreamWithoutEnd {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// Checkpoints do not continue a device's stream.
    #[error(
        "the stream of device {device:?}, instance {instance}, has no section for its epochs (specs/replica.md §5)"
    )]
    StreamWithoutEpochs {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// A section of checkpoints continues a stream that did not begin.
    #[error("section {section:?} continues a stream that did not begin")]
    EpochsWithoutStream {
        /// Name of the section.
        section: String,
    },
}
