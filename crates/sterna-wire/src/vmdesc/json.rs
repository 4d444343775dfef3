//! Access to the few members of the JSON that this crate needs.
//!
//! QEMU writes some keys twice into one object. The `Value` of serde_json keeps the last one. That is correct
//! here, because the repeated keys lie deeper than every member that this crate reads. Derived structs would
//! refuse repeated keys.

use crate::error::WireError;
use serde_json::Value;

const SPEC: &str = "specs/stream.md §1.6";

/// The value of `parent[key]`, or an error that names the key.
pub(super) fn member<'a>(parent: &'a Value, key: &'static str) -> Result<&'a Value, WireError> {
    parent.get(key).ok_or_else(|| bad(format!("member {key:?} is missing")))
}

/// The value of `parent[key]` as an array.
pub(super) fn array<'a>(parent: &'a Value, key: &'static str) -> Result<&'a [Value], WireError> {
    let value = member(parent, key)?;
    value.as_array().map(Vec::as_slice).ok_or_else(|| bad(format!("member {key:?} is not an array")))
}

/// The value of `parent[key]` as a text.
pub(super) fn text<'a>(parent: &'a Value, key: &'static str) -> Result<&'a str, WireError> {
    member(parent, key)?.as_str().ok_or_else(|| bad(format!("member {key:?} is not text")))
}

/// The value of `parent[key]` as a number.
pub(super) fn number(parent: &Value, key: &'static str) -> Result<u64, WireError> {
    member(parent, key)?.as_u64().ok_or_else(|| bad(format!("member {key:?} is not a whole number")))
}

pub(super) fn bad(rule: impl Into<std::borrow::Cow<'static, str>>) -> WireError {
    WireError::misbehaved("description", 0, SPEC, rule)
}
