//! Writing the description.

use crate::error::WireError;
use crate::limits::VM_DESCRIPTION_BYTES;
use crate::main::Configuration;
use serde_json::{Value, json};

/// One field of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Its type, as QEMU would call it: `uint32`, `buffer`, …
    pub kind: String,
    /// Bytes that it takes in the body.
    pub size: u64,
}

impl Field {
    /// A field.
    pub fn new(name: impl Into<String>, kind: impl Into<String>, size: u64) -> Self {
        Self { name: name.into(), kind: kind.into(), size }
    }
}

/// One FULL section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name of the section.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Version of its body.
    pub version: u32,
    /// Its fields; their sizes add up to the length of the body.
    pub fields: Vec<Field>,
}

/// The JSON for these FULL sections, in stream order, and a machine type of so many bytes.
pub fn build(machine_type: &str, devices: &[Device]) -> String {
    let configuration = Configuration { machine_type: machine_type.to_owned(), ..Configuration::default() };
    build_for(&configuration, devices)
}

/// As [`build`], for a stream that begins with this configuration.
pub fn build_for(configuration: &Configuration, devices: &[Device]) -> String {
    let configuration = describe(configuration);
    let devices: Vec<Value> = devices.iter().map(device).collect();
    let text = json!({ "configuration": configuration, "page_size": crate::PAGE_SIZE, "devices": devices });
    to_ascii(&text.to_string())
}

/// The configuration and its subsections, as QEMU describes them.
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
        // Of several, QEMU gives the size of the first.
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

/// JSON outside ASCII occurs in texts only, where an escape means the same.
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

/// Appends the element: `06`, a length and the text (§1.6). It comes right after EOF. Any bytes will do: what was read is
/// given back as it was.
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when the text is longer than a receiver takes.
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
