//! The error of a refused command: QEMU's error class, and a sentence that contains advice.

use serde_json::{Value, json};

/// QEMU's error classes. Programs evaluate the class, and people read the description.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// All errors without a more specific class.
    GenericError,
    /// The command does not exist, or is not allowed in this state of the session.
    CommandNotFound,
    /// A device is not in the state that the command needs.
    DeviceNotActive,
    /// A device does not exist.
    DeviceNotFound,
}

impl ErrorClass {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
        }
    }
}

/// The refusal of a command. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{desc}")]
#[non_exhaustive]
pub struct QmpError {
    /// The class, for programs.
    pub class: ErrorClass,
    /// The description, for people.
    pub desc: String,
}

impl QmpError {
    /// An error of the class `GenericError`.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self { class: ErrorClass::GenericError, desc: desc.into() }
    }

    /// An error of the class `CommandNotFound`.
    pub fn command_not_found(desc: impl Into<String>) -> Self {
        Self { class: ErrorClass::CommandNotFound, desc: desc.into() }
    }

    /// The command does not know the argument `name`.
    pub fn unexpected(name: &str) -> Self {
        Self::generic(format!("Parameter '{name}' is unexpected"))
    }

    /// The command needs the argument `name`.
    pub fn missing(name: &str) -> Self {
        Self::generic(format!("Parameter '{name}' is missing"))
    }

    /// The argument `name` has another JSON type than `expected`.
    pub fn wrong_type(name: &str, expected: &str) -> Self {
        Self::generic(format!("Invalid parameter type for '{name}', expected: {expected}"))
    }

    /// The argument `name` is outside its range. `what` describes the range.
    pub fn expects(name: &str, what: impl std::fmt::Display) -> Self {
        Self::generic(format!("Parameter '{name}' expects {what}"))
    }

    /// The member `error` of the answer.
    pub fn to_json(&self) -> Value {
        json!({"class": self.class.as_str(), "desc": self.desc})
    }
}
