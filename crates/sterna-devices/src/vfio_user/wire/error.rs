//! Errors of malformed messages, with the message, the byte and the broken rule.

/// A message breaks a rule of the protocol. Its sender is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The size in the header is out of range.
    #[error("{message}, byte 4: a size of {size} bytes; it must be {least} to {most}")]
    Size {
        /// Name of the message.
        message: &'static str,
        /// Size in the header, in bytes.
        size: u32,
        /// Smallest permitted size in bytes.
        least: u32,
        /// Largest permitted size in bytes.
        most: u32,
    },
    /// The message ends inside a field.
    #[error("{message}, byte {at}: {field} needs {needed} bytes, but only {left} are left")]
    Truncated {
        /// Name of the message.
        message: &'static str,
        /// Offset of the field in the message.
        at: usize,
        /// Name of the field.
        field: &'static str,
        /// Length of the field in bytes.
        needed: u64,
        /// Bytes that remain in the message.
        left: u64,
    },
    /// Bytes follow the last field.
    #[error("{message}, byte {at}: {left} bytes too many")]
    Trailing {
        /// Name of the message.
        message: &'static str,
        /// Offset at which the message should end.
        at: usize,
        /// Number of surplus bytes.
        left: u64,
    },
    /// A field has a forbidden value.
    #[error("{message}, byte {at}: {field} is {value:#x}: {rule}")]
    Value {
        /// Name of the message.
        message: &'static str,
        /// Offset of the field in the message.
        at: usize,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u64,
        /// The rule that the value breaks.
        rule: &'static str,
    },
    /// The capabilities are not JSON of the required form.
    #[error("{message}, byte {at}: {why}")]
    Text {
        /// Name of the message.
        message: &'static str,
        /// Offset of the text in the message.
        at: usize,
        /// Reason given by the parser.
        why: String,
    },
    /// The number of descriptors is wrong.
    #[error("{message}: it has {got} descriptors; {rule}")]
    Descriptors {
        /// Name of the message.
        message: &'static str,
        /// Number of descriptors received.
        got: usize,
        /// The rule for the number.
        rule: &'static str,
    },
    /// A reply names another command than the request.
    #[error("{message}, byte {at}: it answers command {got}, but command {expected} was sent")]
    WrongReply {
        /// Name of the message.
        message: &'static str,
        /// Offset of the command in the reply.
        at: usize,
        /// Number of the command in the reply.
        got: u16,
        /// Number of the command in the request.
        expected: u16,
    },
}
