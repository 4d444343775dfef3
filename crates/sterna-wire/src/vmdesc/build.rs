//! Encoder of the description (`specs/stream.md §1.6`).

use crate::error::WireError;
use crate::limits::VM_DESCRIPTION_BYTES;
use crate::main::configuration::Configuration;
use serde_json::{Value, json};

/// One field in the state of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Name of the field.
    pub name: String,
    /// QEMU's name for the type: `uint32`, `buffer` and others.
    pub kind: String,
    /// Bytes of the field in the body.
    pub size: u64,
}

impl Field {
    /// A field with this name, type and size in bytes.
    pub fn new(name: impl Into<String>, kind: impl Into<String>, size: u64) -> Self {
        Self { name: name.into(), kind: kind.into(), size }
    }
}

/// One FULL section of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name of the section.
    pub name: String,
    /// Number that distinguishes devices with the same name.
    pub instance: u32,
    /// Version of the section's body.
    pub version: u32,
    /// Fields of the body. Their sizes add up to its length.
    pub fields: Vec<Field>,
}

/// The JSON for these FULL sections, in stream order, with this machine type.
pub fn build(machine_type: &str, devices: &[Device]) -> String {
    let configuration = Configuration { machine_type: machine_type.to_owned(), ..Configuration::default() };
    build_for(&configuration, devices)
}

/// Like [`build`], for a stream that begins with this configuration.
pub fn build_for(configuration: &Configuration, devices: &[Device]) -> String {
    let configuration = describe(configuration);
    let devices: Vec<Value> = devices.iter().map(device).collect();
    let text = json!({ "configuration": configuration, "page_size": crate::PAGE_SIZE, "devices": devices });
    to_ascii(&text.to_string())
}

/// The configuration and its subsections, in the form that QEMU uses.
fn describe(configuration: &Configuration) -> Value {
    let mut described = json!({
        "vmsd_name": "configuration",
        "version": 1,
        "fields": [
            field(&Field::new("len", "uint32", 4)),
            field(&Field::new("name", "buffer", configuration.machine_type.len() as u64)),
        ],
    });
    let mut subsections = Vec::new();
    let mut subsection = |name: &str, fields: Vec<Value>| {
        let name = format!("configuration/{name}");
        subsections.push(json!({ "vmsd_name": name, "version": 1, "fields": fields }));
    };
    if configuration.target_page_bits.is_some() {
        subsection("target-page-bits", vec![field(&Field::new("target_page_bits", "uint32", 4))]);
    }
    if let Some(first) = configuration.capabilities.first() {
        // For several capabilities, QEMU states the size of the first one.
        let mut list = field(&Field::new("capabilities", "capability", 1 + first.len() as u64));
        if configuration.capabilities.len() > 1 {
            list["array_len"] = configuration.capabilities.len().into();
        }
        subsection("capabilities", vec![field(&Field::new("caps_count", "uint32", 4)), list]);
    }
    if configuration.uuid.is_some() {
        let mut bytes = field(&Field::new("uuid.data", "uint8", 1));
        bytes["array_len"] = 16.into();
        subsection("uuid", vec![bytes]);
    }
    if !subsections.is_empty() {
        described["subsections"] = subsections.into();
    }
    described
}

/// Escapes the characters outside ASCII. They occur only in JSON strings, where an escape has the same meaning.
fn to_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii() {
            out.push(character);
        } else {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// Appends the element: `06`, a length and the text (§1.6). It must follow EOF directly.
///
/// The text may have any bytes, so that a description can be written back unchanged.
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when the text is longer than [`VM_DESCRIPTION_BYTES`].
pub fn encode(description: &(impl AsRef<[u8]> + ?Sized), out: &mut Vec<u8>) -> Result<(), WireError> {
    let description = description.as_ref();
    if description.len() > VM_DESCRIPTION_BYTES {
        let rule = format!("{} bytes, more than {VM_DESCRIPTION_BYTES}", description.len());
        return Err(WireError::local("description", 1, "specs/stream.md §1.6", rule));
    }
    out.push(0x06);
    out.extend_from_slice(&(description.len() as u32).to_be_bytes());
    out.extend_from_slice(description);
    Ok(())
}

fn device(device: &Device) -> Value {
    json!({
        "name": device.name,
        "instance_id": device.instance,
        "vmsd_name": device.name,
        "version": device.version,
        "fields": device.fields.iter().map(field).collect::<Vec<_>>(),
    })
}

fn field(field: &Field) -> Value {
    json!({ "name": field.name, "type": field.kind, "size": field.size })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmdesc::section_lengths;

    #[test]
    fn build_name_outside_ascii_is_escaped_and_comes_back() {
        let fields = vec![Field::new("ü", "buffer", 7)];
        let device = Device { name: "größe 🐧".into(), instance: 2, version: 1, fields };

        let text = build("none", &[device]);

        assert!(text.is_ascii(), "{text}");
        let lengths = section_lengths(&text).unwrap();
        assert_eq!((lengths[0].name.as_str(), lengths[0].length_bytes), ("größe 🐧", 7));
    }
}
