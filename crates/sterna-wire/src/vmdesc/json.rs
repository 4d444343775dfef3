//! Picking the few members out of the JSON that matter.
//!
//! QEMU writes some keys twice into one object. serde_json's own `Value` keeps the last of them, which is what is
//! wanted: the doubled keys lie deeper than anything read here. (Derived structs would refuse them.)

use crate::error::WireError;
use serde_json::Value;

const SPEC: &str = "specs/stream.md §1.6";

/// `parent[key]`, or an error that names it.
pub(super) fn member<'a>(parent: &'a Value, key: &'static str) -> Result<&'a Value, WireError> {
    parent.get(key).ok_or_else(|| bad(format!("member {key:?} is missing")))
}

/// `parent[key]` as an array.
pub(super) fn array<'a>(parent: &'a Value, key: &'static str) -> Result<&'a [Value], WireError> {
    let value = member(parent, key)?;
    value.as_array().map(Vec::as_slice).ok_or_else(|| bad(format!("member {key:?} is no array")))
}

/// `parent[key]` as a text.
pub(super) fn text<'a>(parent: &'a Value, key: &'static str) -> Result<&'a str, WireError> {
    member(parent, key)?.as_str().ok_or_else(|| bad(format!("member {key:?} is no text")))
}

/// `parent[key]` as a number.
pub(super) fn number(parent: &Value, key: &'static str) -> Result<u64, WireError> {
    member(parent, key)?.as_u64().ok_or_else(|| bad(format!("member {key:?} is no whole number")))
}

pub(super) fn bad(rule: impl Into<std::borrow::Cow<'static, str>>) -> WireError {
    WireError::misbehaved("description", 0, SPEC, rule)
}
