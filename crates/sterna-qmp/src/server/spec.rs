//! Declarations of commands and events: names, types, and one sentence each.
//!
//! Arguments, answers and events are declared once. The check of a command's arguments, `query-commands`,
//! `query-qmp-schema` and docs/qmp.md are derived from the declarations. Debug builds compare each answer and event
//! with its declaration.

use serde_json::{Map, Value};

use crate::error::QmpError;

/// The version of declarations that have no other one.
const FIRST: &str = "0.1";

/// A command: its arguments, its answer, and its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandSpec {
    /// The name on the wire.
    pub name: &'static str,
    /// The effect of the command, in one sentence.
    pub about: &'static str,
    /// All arguments of the command.
    pub arguments: &'static [MemberSpec],
    /// Type of the answer. `None`: an empty object.
    pub returns: Option<MemberKind>,
    /// The first version of Sterna that has it.
    pub since: &'static str,
}

/// An event and its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventSpec {
    /// The name on the wire.
    pub name: &'static str,
    /// The time when it is sent, in one sentence.
    pub about: &'static str,
    /// The members of its data. An event without members has no data.
    pub members: &'static [MemberSpec],
    /// The capability that must be on. `None`: it is always sent.
    pub only_with: Option<&'static str>,
    /// The first version of Sterna that has it.
    pub since: &'static str,
}

/// A member of an object: an argument, or a part of an answer or of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberSpec {
    /// The name on the wire.
    pub name: &'static str,
    /// Type of the value.
    pub kind: MemberKind,
    /// Whether the member may be absent.
    pub optional: bool,
    /// The meaning, in one sentence. Empty if the command's sentence is enough.
    pub about: &'static str,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberKind {
    /// A string of any content.
    String,
    /// A string, or null, which has the same meaning as the empty string.
    StringOrNull,
    /// One of these strings.
    Word(&'static [&'static str]),
    /// A JSON number without a fraction.
    Integer,
    /// A number that may have a fraction.
    Number,
    /// `true` or `false`.
    Boolean,
    /// A list with any elements.
    Array,
    /// A list of objects with these members.
    List(&'static [MemberSpec]),
    /// An object with any members.
    Object,
    /// An object with these members.
    Members(&'static [MemberSpec]),
    /// A value that only the command itself checks.
    Any,
}

impl CommandSpec {
    /// A command without arguments and with an empty answer.
    pub const fn new(name: &'static str, about: &'static str) -> Self {
        Self { name, about, arguments: &[], returns: None, since: FIRST }
    }

    /// Adds these arguments.
    pub const fn takes(self, arguments: &'static [MemberSpec]) -> Self {
        Self { arguments, ..self }
    }

    /// Sets the first version of Sterna that has the command.
    pub const fn since(self, version: &'static str) -> Self {
        Self { since: version, ..self }
    }

    /// Sets the type of the answer.
    pub const fn returns(self, kind: MemberKind) -> Self {
        Self { returns: Some(kind), ..self }
    }

    /// Refuses arguments that are missing, unknown or of another type, with QEMU's error texts.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        for spec in self.arguments {
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

    /// The difference between an answer and its declaration. `None` if there is none.
    pub fn undeclared(&self, answer: &Value) -> Option<String> {
        let kind = self.returns.unwrap_or(MemberKind::Members(&[]));
        kind.undeclared(answer).map(|what| format!("the answer of {} is not as declared: {what}", self.name))
    }
}

impl EventSpec {
    /// An event without data.
    pub const fn new(name: &'static str, about: &'static str) -> Self {
        Self { name, about, members: &[], only_with: None, since: FIRST }
    }

    /// Adds data with these members.
    pub const fn with(self, members: &'static [MemberSpec]) -> Self {
        Self { members, ..self }
    }

    /// Sets the first version of Sterna that has the event.
    pub const fn since(self, version: &'static str) -> Self {
        Self { since: version, ..self }
    }

    /// Sets the capability that must be on.
    pub const fn only_with(self, capability: &'static str) -> Self {
        Self { only_with: Some(capability), ..self }
    }

    /// The difference between an event's data and its declaration. `None` if there is none.
    pub fn undeclared(&self, data: Option<&Value>) -> Option<String> {
        let empty = Value::Object(Map::new());
        let what = MemberKind::Members(self.members).undeclared(data.unwrap_or(&empty))?;
        Some(format!("the event {} is not as declared: {what}", self.name))
    }
}

impl MemberSpec {
    /// A member that is always present.
    pub const fn required(name: &'static str, kind: MemberKind, about: &'static str) -> Self {
        Self { name, kind, optional: false, about }
    }

    /// A member that may be absent.
    pub const fn optional(name: &'static str, kind: MemberKind, about: &'static str) -> Self {
        Self { name, kind, optional: true, about }
    }
}

/// [`MemberSpec::required`] for tables.
pub(crate) const fn required(name: &'static str, kind: MemberKind, about: &'static str) -> MemberSpec {
    MemberSpec::required(name, kind, about)
}

/// [`MemberSpec::optional`] for tables.
pub(crate) const fn optional(name: &'static str, kind: MemberKind, about: &'static str) -> MemberSpec {
    MemberSpec::optional(name, kind, about)
}

impl MemberKind {
    /// Checks an argument's JSON type. The commands check words, so that the refusal lists the possible ones.
    fn check(self, name: &str, value: &Value) -> Result<(), QmpError> {
        if self.fits(value) { Ok(()) } else { Err(QmpError::wrong_type(name, self.as_str())) }
    }

    fn fits(self, value: &Value) -> bool {
        match self {
            Self::String | Self::Word(_) => value.is_string(),
            Self::Integer => value.is_i64() || value.is_u64(),
            Self::Number => value.is_number(),
            Self::Boolean => value.is_boolean(),
            Self::Array | Self::List(_) => value.is_array(),
            Self::Object | Self::Members(_) => value.is_object(),
            // The parameter's own check names the parameter and its range.
            Self::StringOrNull | Self::Any => true,
        }
    }

    /// QEMU's name of the type in error texts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::String | Self::Word(_) => "string",
            Self::StringOrNull => "string or null",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
            Self::Array | Self::List(_) => "array",
            Self::Object | Self::Members(_) => "object",
            Self::Any => "any",
        }
    }

    /// The difference between `value` and this type. `None` if there is none.
    fn undeclared(self, value: &Value) -> Option<String> {
        if !self.fits(value) {
            return Some(format!("{value} is not of type {}", self.as_str()));
        }
        match (self, value) {
            (Self::Word(words), Value::String(word)) if !words.contains(&word.as_str()) => {
                Some(format!("{word:?} is none of {}", words.join(", ")))
            }
            (Self::List(members), Value::Array(list)) => {
                list.iter().find_map(|entry| Self::Members(members).undeclared(entry))
            }
            (Self::Members(members), Value::Object(object)) => {
                let unknown = object.keys().find(|key| !members.iter().any(|member| member.name == *key));
                let unknown = unknown.map(|key| format!("it has {key:?}"));
                unknown.or_else(|| members.iter().find_map(|member| member.undeclared_in(object)))
            }
            _ => None,
        }
    }
}

impl MemberSpec {
    fn undeclared_in(&self, object: &Map<String, Value>) -> Option<String> {
        match object.get(self.name) {
            // An answer may contain `null` instead of an absent member.
            None | Some(Value::Null) if self.optional => None,
            None => Some(format!("it has no {:?}", self.name)),
            Some(value) => self.kind.undeclared(value).map(|what| format!("{:?}: {what}", self.name)),
        }
    }
}
