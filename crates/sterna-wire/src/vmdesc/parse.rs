//! Decoder of the description (`specs/stream.md §1.6`).

use super::json::{array, bad, number, text};
use crate::error::WireError;
use crate::limits::{VM_DESCRIPTION_BYTES, VM_DESCRIPTION_VALUES};
use serde_json::Value;

/// Length of one FULL section's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionLength {
    /// Name of the section.
    pub name: String,
    /// Number that distinguishes devices with the same name.
    pub instance: u32,
    /// Length of the section's body, in bytes.
    pub length_bytes: u64,
}

/// Parses the JSON of a description, within the limits of this crate.
///
/// # Errors
/// A text that is too long, is not UTF-8, has too many values, is nested too deep, or is not a JSON object.
pub fn parse(description: &(impl AsRef<[u8]> + ?Sized)) -> Result<Value, WireError> {
    let description = description.as_ref();
    if description.len() > VM_DESCRIPTION_BYTES {
        return Err(bad(format!("{} bytes, more than {VM_DESCRIPTION_BYTES}", description.len())));
    }
    // One of these bytes precedes every value but the first. Strings may contain such bytes too, so the count
    // is an upper bound.
    let values = description.iter().filter(|byte| matches!(byte, b'[' | b'{' | b',' | b':')).count();
    if values > VM_DESCRIPTION_VALUES {
        return Err(bad(format!("{values} values, more than {VM_DESCRIPTION_VALUES}")));
    }
    let text = std::str::from_utf8(description).map_err(|error| bad(format!("not UTF-8: {error}")))?;
    // serde_json refuses nesting deeper than 128.
    let value: Value = serde_json::from_str(text).map_err(|error| bad(format!("not JSON: {error}")))?;
    if !value.is_object() {
        return Err(bad("not a JSON object"));
    }
    Ok(value)
}

/// The lengths of all FULL sections, in stream order.
///
/// # Errors
/// As [`parse`]; a member that is missing or has another type; a length that does not fit 64 bits.
pub fn section_lengths(description: &(impl AsRef<[u8]> + ?Sized)) -> Result<Vec<SectionLength>, WireError> {
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

/// Sum of the sizes of fields and subsections. The recursion is bounded, because the parser limits the nesting.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_lengths_example_with_doubled_keys_and_subsections_adds_up() {
        let text = r#"{"configuration": {}, "page_size": 4096, "devices": [
            {"name": "a/b", "instance_id": 3, "vmsd_name": "b", "version": 1,
             "fields": [{"name": "x", "type": "s", "size": 10, "struct": {"fields": []}, "struct": {"fields": []}},
                        {"name": "y", "type": "u", "size": 4, "array_len": 5}],
             "subsections": [{"vmsd_name": "b/sub", "version": 1, "fields": [{"name": "z", "size": 2}]}]},
            {"name": "old", "instance_id": 0, "size": 7, "fields": [{"name": "data", "size": 7}]}]}"#;

        let lengths = section_lengths(text).unwrap();

        let lengths: Vec<_> = lengths.iter().map(|s| (s.name.as_str(), s.instance, s.length_bytes)).collect();
        assert_eq!(lengths, [("a/b", 3, 10 + 20 + 1 + 1 + 5 + 4 + 2), ("old", 0, 7)]);
    }

    #[test]
    fn section_lengths_of_utf8_are_read_and_of_other_bytes_refused() {
        let text = "{\"devices\": [{\"name\": \"größe\", \"instance_id\": 0, \"fields\": []}]}";
        let latin: Vec<u8> = text.chars().map(|character| character as u8).collect();

        assert_eq!(section_lengths(text).unwrap()[0].name, "größe");
        assert!(section_lengths(&latin).unwrap_err().rule.contains("UTF-8"));
    }

    #[test]
    fn section_lengths_hostile_text_is_refused() {
        let device = |body: &str| format!(r#"{{"devices": [{{"name": "a", "instance_id": 0, {body}}}]}}"#);
        let deep = "[".repeat(100_000);
        let many = format!("[{}0]", "0,".repeat(VM_DESCRIPTION_VALUES));
        let long = " ".repeat(VM_DESCRIPTION_BYTES + 1);
        let overflow = device(r#""fields": [{"size": 18446744073709551615, "array_len": 2}]"#);
        let sum = device(r#""fields": [{"size": 18446744073709551615}, {"size": 1}]"#);
        let negative = device(r#""fields": [{"size": -1}]"#);
        let no_fields = device(r#""version": 1"#);
        for text in [&deep, &many, &long, &overflow, &sum, &negative, &no_fields, "[]", "", "{}", "nonsense"]
        {
            assert!(section_lengths(text).is_err(), "{}", &text[..text.len().min(80)]);
        }
    }
}
