//! Reads a command's arguments by type.

use serde_json::{Map, Value};

use crate::error::QmpError;

/// Typed access to the members of an object that was not validated.
#[derive(Clone, Copy)]
pub struct Arguments<'a>(pub &'a Map<String, Value>);

impl<'a> Arguments<'a> {
    /// A string. None if it is absent.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>, QmpError> {
        match self.0.get(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| QmpError::wrong_type(name, "string")),
        }
    }

    /// A string that must be present.
    pub fn required_string(&self, name: &str) -> Result<&'a str, QmpError> {
        self.string(name)?.ok_or_else(|| QmpError::missing(name))
    }

    /// A boolean. False if it is absent.
    pub fn flag(&self, name: &str) -> Result<bool, QmpError> {
        match self.0.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| QmpError::wrong_type(name, "boolean")),
        }
    }

    /// Refuses members that are not in `known`.
    pub fn only(&self, known: &[&str]) -> Result<(), QmpError> {
        match self.0.keys().find(|key| !known.contains(&key.as_str())) {
            Some(unknown) => Err(QmpError::unexpected(unknown)),
            None => Ok(()),
        }
    }
}
