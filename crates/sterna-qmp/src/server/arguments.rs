//! Commands' arguments: what each takes, and the check that every command gets alike.

use serde_json::{Map, Value};

use crate::error::QmpError;

/// A command and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandSpec {
    /// As clients say it.
    pub name: &'static str,
    /// Every argument that it takes.
    pub arguments: Vec<ArgumentSpec>,
}

/// One argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgumentSpec {
    /// As clients say it.
    pub name: &'static str,
    /// Its JSON type.
    pub kind: ArgumentKind,
    /// Whether the command works without it.
    pub optional: bool,
}

/// An argument's JSON type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentKind {
    /// A string.
    String,
    /// An integer.
    Integer,
    /// `true` or `false`.
    Boolean,
    /// A list.
    Array,
    /// An object.
    Object,
    /// The command looks itself.
    Any,
}

impl CommandSpec {
    /// A command without arguments.
    pub fn new(name: &'static str) -> Self {
        Self { name, arguments: Vec::new() }
    }

    /// With an argument that must be there.
    pub fn required(mut self, name: &'static str, kind: ArgumentKind) -> Self {
        self.arguments.push(ArgumentSpec { name, kind, optional: false });
        self
    }

    /// With an argument that may be there.
    pub fn optional(mut self, name: &'static str, kind: ArgumentKind) -> Self {
        self.arguments.push(ArgumentSpec { name, kind, optional: true });
        self
    }

    /// Refuses arguments that are missing, of another type or unknown, with QEMU's words.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        for spec in &self.arguments {
            match arguments.get(spec.name) {
                None if !spec.optional => return Err(QmpError::missing(spec.name)),
                None => {}
                Some(value) => spec.kind.check(spec.name, value)?,
            }
        }
        match arguments.keys().find(|key| !self.arguments.iter().any(|spec| spec.name == key.as_str())) {
            Some(unknown) => Err(QmpError::unexpected(unknown)),
            None => Ok(()),
        }
    }
}

impl ArgumentKind {
    fn check(self, name: &str, value: &Value) -> Result<(), QmpError> {
        let fits = match self {
            Self::String => value.is_string(),
            Self::Integer => value.is_i64() || value.is_u64(),
            Self::Boolean => value.is_boolean(),
            Self::Array => value.is_array(),
            Self::Object => value.is_object(),
            Self::Any => true,
        };
        if fits { Ok(()) } else { Err(QmpError::wrong_type(name, self.as_str())) }
    }

    /// QEMU's word for it in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Integer => "integer",
            Self::Boolean => "boolean",
            Self::Array => "array",
            Self::Object => "object",
            Self::Any => "any",
        }
    }
}

/// Typed looks into an object whose shape nobody has checked yet.
#[derive(Clone, Copy)]
pub struct Arguments<'a>(pub &'a Map<String, Value>);

impl<'a> Arguments<'a> {
    /// A string, if it is there.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, QmpError> {
        match self.0.get(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| QmpError::wrong_type(name, "string")),
        }
    }

    /// A string that must be there.
    pub fn required_string(&self, name: &str) -> Result<&'a str, QmpError> {
        self.string(name)?.ok_or_else(|| QmpError::missing(name))
    }

    /// A boolean, false if it is not there.
    pub fn flag(&self, name: &str) -> Result<bool, QmpError> {
        match self.0.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| QmpError::wrong_type(name, "boolean")),
        }
    }

    /// Refuses members other than `known`.
    pub fn only(&self, known: &[&str]) -> Result<(), QmpError> {
        match self.0.keys().find(|key| !known.contains(&key.as_str())) {
            Some(unknown) => Err(QmpError::unexpected(unknown)),
            None => Ok(()),
        }
    }
}
