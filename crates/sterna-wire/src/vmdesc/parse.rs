//! Reading the description.

use super::json::{array, bad, number, text};
use crate::error::WireError;
use crate::limits::VM_DESCRIPTION_BYTES;
use serde_json::Value;

/// Length of one FULL section's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionLength {
    /// Name of the section.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Length of its body in bytes.
    pub length_bytes: u64,
}

/// Reads the JSON.
///
/// # Errors
/// A text that is too long, nested too deep, or no JSON object.
pub fn parse(description: &str) -> Result<Value, WireError> {
    if description.len() > VM_DESCRIPTION_BYTES {
        return Err(bad(format!("{} bytes, more than {VM_DESCRIPTION_BYTES}", description.len())));
    }
    // serde_json refuses nesting deeper than 128.
    let value: Value = serde_json::from_str(description).map_err(|error| bad(format!("no JSON: {error}")))?;
    if !value.is_object() {
        return Err(bad("no JSON object"));
    }
    Ok(value)
}

/// The lengths of all FULL sections, in stream order.
///
/// # Errors
/// As [`parse`], a member that is missing or of another type, a length that does not fit.
pub fn section_lengths(description: &str) -> Result<Vec<SectionLength>, WireError> {
    let value = parse(description)?;
    array(&value, "devices")?.iter().map(section_length).collect()
}

fn section_length(device: &Value) -> Result<SectionLength, WireError> {
    let instance = number(device, "instance_id")?;
    let Ok(instance) = u32::try_from(instance) else {
        return Err(bad(format!("instance {instance} does not fit 32 bits")));
    };
    Ok(SectionLength { name: text(device, "name")?.to_owned(), instance, length_bytes: body_length(device)? })
}

/// Sum over fields and subsections. Depth is bounded: the JSON was.
fn body_length(structure: &Value) -> Result<u64, WireError> {
    let too_long = || bad("a length does not fit 64 bits");
    let mut length = 0u64;
    for field in array(structure, "fields")? {
        let count = match field.get("array_len") {
            Some(_) => number(field, "array_len")?,
            None => 1,
        };
        let bytes = number(field, "size")?.checked_mul(count).ok_or_else(too_long)?;
        length = length.checked_add(bytes).ok_or_else(too_long)?;
    }
    if structure.get("subsections").is_some() {
        for subsection in array(structure, "subsections")? {
            let head = 1 + 1 + text(subsection, "vmsd_name")?.len() as u64 + 4;
            let bytes = body_length(subsection)?.checked_add(head).ok_or_else(too_long)?;
            length = length.checked_add(bytes).ok_or_else(too_long)?;
        }
    }
    Ok(length)
}
