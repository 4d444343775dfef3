//! What is wrong with a machine's texts.

use super::rules::SLOTS_MOST;

/// The texts of a machine break a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// A text cannot be decoded.
    #[error("its {text} cannot be read: {why} (specs/ch-offload.md §4)")]
    Text {
        /// Which text: `Config`, `State`, or the name of a file.
        text: &'static str,
        /// The rule that the text breaks.
        why: String,
    },
    /// A text lacks a member that is needed.
    #[error("its {text} lacks {member}{advice}")]
    Lacks {
        /// Which text.
        text: &'static str,
        /// The member.
        member: &'static str,
        /// What to do, as the rest of the sentence.
        advice: &'static str,
    },
    /// The number of memory slots is not possible.
    #[error("its configuration has {count} memory slots, but 1 to {SLOTS_MOST} are possible")]
    Slots {
        /// Number of slots.
        count: usize,
    },
    /// A slot or a range has a number that is not possible.
    #[error("{what} has {field} {value:#x}, which {rule} (specs/ch-offload.md §4)")]
    Number {
        /// The slot or the range.
        what: String,
        /// Name of the number.
        field: &'static str,
        /// The number.
        value: u64,
        /// The broken rule, as the rest of a sentence.
        rule: &'static str,
    },
    /// Two slots or two ranges have the same addresses.
    #[error("two {what} contain the guest address {address:#x} (specs/ch-offload.md §4)")]
    Overlap {
        /// What overlaps.
        what: &'static str,
        /// The first shared address.
        address: u64,
    },
    /// A range is not memory of the machine.
    #[error(
        "the memory range at {address:#x} contains {missing:#x}, which is in no memory slot (specs/ch-offload.md §4)"
    )]
    NoSlot {
        /// First address of the range.
        address: u64,
        /// The first address without a slot.
        missing: u64,
    },
    /// Memory of the machine is not part of its snapshots.
    #[error(
        "the memory at {address:#x} (zone {zone:?}) is not part of the VMM's snapshots, because a file of the operator \
         contains it: such a machine cannot be saved; give the VM memory without file="
    )]
    Outside {
        /// The first address that no range contains.
        address: u64,
        /// Name of the memory zone.
        zone: String,
    },
    /// The image has another length than the machine's memory.
    #[error(
        "the image has {image} bytes of memory, but its machine has {machine}: it is not the image of this machine"
    )]
    OtherLength {
        /// Bytes of the image's memory.
        image: u64,
        /// Bytes of the machine's memory.
        machine: u64,
    },
}
