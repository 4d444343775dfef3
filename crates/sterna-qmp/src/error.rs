//! What a refused command is answered: QEMU's error classes, and a sentence that says what to do.

use serde_json::{Value, json};

/// QEMU's error classes. Programs look at these; the description is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// Everything without a class of its own.
    GenericError,
    /// The command does not exist, or not in this state of the session.
    CommandNotFound,
    /// A device is not in the state that the command needs.
    DeviceNotActive,
    /// A device does not exist.
    DeviceNotFound,
}

impl ErrorClass {
    /// The spelling on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
        }
    }
}

/// A command was refused; nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{desc}")]
#[non_exhaustive]
pub struct QmpError {
    /// For programs.
    pub class: ErrorClass,
    /// For people.
    pub desc: String,
}

impl QmpError {
    /// An error of the class that most have.
    pub fn generic(desc: impl Into<String>) -> Self {
        Self { class: ErrorClass::GenericError, desc: desc.into() }
    }

    /// The command is unknown here.
    pub fn command_not_found(desc: impl Into<String>) -> Self {
        Self { class: ErrorClass::CommandNotFound, desc: desc.into() }
    }

    /// An argument that the command does not know.
    pub fn unexpected(name: &str) -> Self {
        Self::generic(format!("Parameter '{name}' is unexpected"))
    }

    /// An argument that the command needs.
    pub fn missing(name: &str) -> Self {
        Self::generic(format!("Parameter '{name}' is missing"))
    }

    /// An argument of another JSON type than `expected`.
    pub fn wrong_type(name: &str, expected: &str) -> Self {
        Self::generic(format!("Invalid parameter type for '{name}', expected: {expected}"))
    }

    /// An argument outside its range.
    pub fn expects(name: &str, what: impl std::fmt::Display) -> Self {
        Self::generic(format!("Parameter '{name}' expects {what}"))
    }

    /// The answer's `error` member.
    pub fn to_json(&self) -> Value {
        json!({"class": self.class.as_str(), "desc": self.desc})
    }
}
