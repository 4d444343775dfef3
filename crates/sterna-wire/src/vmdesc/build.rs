//! Writing the description.

use crate::error::WireError;
use crate::limits::VM_DESCRIPTION_BYTES;
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
    let configuration = json!({
        "vmsd_name": "configuration",
        "version": 1,
        "fields": [
            field(&Field::new("len", "uint32", 4)),
            field(&Field::new("name", "buffer", machine_type.len() as u64)),
        ],
    });
    let devices: Vec<Value> = devices.iter().map(device).collect();
    json!({ "configuration": configuration, "page_size": crate::PAGE_SIZE, "devices": devices }).to_string()
}

/// Appends the element: `06`, a length and the JSON (§1.6). It comes right after EOF.
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) when the text is longer than a receiver takes.
pub fn encode(description: &str, out: &mut Vec<u8>) -> Result<(), WireError> {
    if description.len() > VM_DESCRIPTION_BYTES {
        let rule = format!("{} bytes, more than {VM_DESCRIPTION_BYTES}", description.len());
        return Err(WireError::local("description", 1, "specs/stream.md §1.6", rule));
    }
    out.push(0x06);
    out.extend_from_slice(&(description.len() as u32).to_be_bytes());
    out.extend_from_slice(description.as_bytes());
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
