//! What a malformed message breaks.

/// A message breaks a rule of the protocol. The sender is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Its size cannot be.
    #[error("{message}, byte 4: a size of {size} bytes; it must be {least} to {most}")]
    Size {
        /// Which message.
        message: &'static str,
        /// The size that it states.
        size: u32,
        /// The least.
        least: u32,
        /// The most.
        most: u32,
    },
    /// It ends inside a field.
    #[error("{message}, byte {at}: {field} needs {needed} bytes, and {left} are left")]
    Truncated {
        /// Which message.
        message: &'static str,
        /// Where the field begins.
        at: usize,
        /// The field.
        field: &'static str,
        /// Its bytes.
        needed: u64,
        /// What is there.
        left: u64,
    },
    /// It goes on behind its last field.
    #[error("{message}, byte {at}: {left} bytes too many")]
    Trailing {
        /// Which message.
        message: &'static str,
        /// Where it should end.
        at: usize,
        /// What is left.
        left: u64,
    },
    /// A field holds what it must not.
    #[error("{message}, byte {at}: {field} is {value:#x}: {rule}")]
    Value {
        /// Which message.
        message: &'static str,
        /// Where the field begins.
        at: usize,
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// What is wrong with that.
        rule: &'static str,
    },
    /// The capabilities are no JSON of the right form.
    #[error("{message}, byte {at}: {why}")]
    Text {
        /// Which message.
        message: &'static str,
        /// Where the text begins.
        at: usize,
        /// What is wrong with it.
        why: String,
    },
    /// It came with another number of descriptors than it needs.
    #[error("{message}: it came with {got} descriptors; {rule}")]
    Descriptors {
        /// Which message.
        message: &'static str,
        /// How many came.
        got: usize,
        /// How many are right.
        rule: &'static str,
    },
    /// A reply answers something else.
    #[error("{message}, byte {at}: it answers command {got}, but command {expected} was sent")]
    WrongReply {
        /// Which message.
        message: &'static str,
        /// Where that stands.
        at: usize,
        /// The command that it answers.
        got: u16,
        /// The command that was sent.
        expected: u16,
    },
}
