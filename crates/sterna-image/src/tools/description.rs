//! The description after a stream, as a map from a device's bytes to field names.
//!
//! QEMU describes each FULL section (specs/stream.md §1.6): fields in order, each with its size. Therefore every byte
//! of an opaque body has a name. `diff` uses this to name the register that differs. `extract` uses it to find the
//! processors' registers. A description is followed only as far as its sizes add up. Otherwise only the enclosing
//! field is known.

use serde_json::Value;
use sterna_wire::WireError;
use sterna_wire::vmdesc;

/// The parsed description of all FULL sections.
#[derive(Debug, Clone)]
pub struct Description {
    devices: Vec<Described>,
    configuration: Value,
}

/// The parsed description of one FULL section.
#[derive(Debug, Clone)]
pub struct Described {
    /// Name of the section.
    pub name: String,
    /// Instance number of the section.
    pub instance: u32,
    /// Version of the body. None for sections that QEMU's older interface writes, such as `slirp`.
    pub version: Option<u32>,
    /// Length of the body in bytes.
    pub length_bytes: u64,
    value: Value,
}

/// A named part of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldPlace {
    /// Name with the enclosing names, such as `env.segs[1].base`.
    pub path: String,
    /// QEMU's name of the type.
    pub kind: String,
    /// Start in the body, in bytes.
    pub offset: u64,
    /// Length of the field in bytes.
    pub bytes: u64,
}

impl Description {
    /// Parses the JSON of a description.
    ///
    /// # Errors
    /// The errors of [`vmdesc::section_lengths`].
    pub fn parse(text: &(impl AsRef<[u8]> + ?Sized)) -> Result<Self, WireError> {
        let text = text.as_ref();
        let value = vmdesc::parse(text)?;
        // The lengths come first, because this call refuses an invalid description.
        let lengths = vmdesc::section_lengths(text)?;
        let configuration = value.get("configuration").cloned().unwrap_or(Value::Null);
        let devices = match value {
            Value::Object(mut members) => members.remove("devices"),
            _ => None,
        };
        let devices = match devices {
            Some(Value::Array(devices)) => devices,
            _ => Vec::new(),
        };
        let devices = lengths
            .into_iter()
            .zip(devices)
            .map(|(length, value)| Described {
                name: length.name,
                instance: length.instance,
                version: value.get("version").and_then(Value::as_u64).map(|version| version as u32),
                length_bytes: length.length_bytes,
                value,
            })
            .collect();
        Ok(Self { devices, configuration })
    }

    /// The sections in stream order.
    pub fn devices(&self) -> &[Described] {
        &self.devices
    }

    /// Names of the configuration's subsections.
    pub fn configuration_subsections(&self) -> Vec<String> {
        members(&self.configuration, "subsections")
            .iter()
            .filter_map(|subsection| Some(subsection.get("vmsd_name")?.as_str()?.to_owned()))
            .collect()
    }

    /// Length of the configuration in bytes without its type byte, according to the description.
    pub fn configuration_bytes(&self) -> u64 {
        own_bytes(&self.configuration)
    }
}

impl Described {
    /// The innermost field that contains byte `at` of the body.
    pub fn locate(&self, at: u64) -> FieldPlace {
        let whole =
            FieldPlace { path: String::new(), kind: "body".into(), offset: 0, bytes: self.length_bytes };
        locate(&self.value, at, whole)
    }

    /// The place and the number of elements of the top-level field `name`.
    pub fn field(&self, name: &str) -> Option<(FieldPlace, u64)> {
        let mut offset = 0;
        for field in members(&self.value, "fields") {
            let (size, count) = extent(field);
            let bytes = size.saturating_mul(count);
            if field.get("name").and_then(Value::as_str) == Some(name) {
                let kind = text(field, "type");
                return Some((FieldPlace { path: name.to_owned(), kind, offset, bytes }, count));
            }
            offset += bytes;
        }
        None
    }

    /// The place of the field `inner` in element `index` of the structure `name`.
    pub fn nested(&self, name: &str, index: u64, inner: &str) -> Option<FieldPlace> {
        let (place, count) = self.field(name)?;
        let field = members(&self.value, "fields").iter().find(|f| text(f, "name") == name)?;
        let structure = inner_structure(field)?;
        if index >= count || count == 0 || own_bytes(structure) != place.bytes / count {
            return None;
        }
        let mut offset = place.offset + index * (place.bytes / count);
        for field in members(structure, "fields") {
            let (size, count) = extent(field);
            let bytes = size.saturating_mul(count);
            if text(field, "name") == inner {
                let path = format!("{name}[{index}].{inner}");
                return Some(FieldPlace { path, kind: text(field, "type"), offset, bytes });
            }
            offset += bytes;
        }
        None
    }
}

/// Descends from `around`, described by `structure`, to the field at byte `at`.
fn locate(structure: &Value, at: u64, around: FieldPlace) -> FieldPlace {
    let mut offset = around.offset;
    for field in members(structure, "fields") {
        let (size, count) = extent(field);
        let bytes = size.saturating_mul(count);
        if at - offset < bytes {
            return inside_field(field, at, offset, size, count, &around);
        }
        offset += bytes;
    }
    for subsection in members(structure, "subsections") {
        let name = text(subsection, "vmsd_name");
        let head = 6 + name.len() as u64;
        let bytes = head + own_bytes(subsection);
        if at - offset < bytes {
            let place = FieldPlace { path: name, kind: "subsection".into(), offset, bytes };
            if at - offset < head {
                return place;
            }
            let place = FieldPlace { offset: offset + head, bytes: bytes - head, ..place };
            return locate(subsection, at, place);
        }
        offset += bytes;
    }
    around
}

fn inside_field(
    field: &Value,
    at: u64,
    offset: u64,
    size: u64,
    count: u64,
    around: &FieldPlace,
) -> FieldPlace {
    let mut path = match around.path.as_str() {
        "" => text(field, "name"),
        prefix => format!("{prefix}.{}", text(field, "name")),
    };
    let element = (at - offset) / size.max(1);
    if let Some(index) = field.get("index").and_then(Value::as_u64) {
        path += &format!("[{index}]");
    } else if field.get("array_len").is_some() && count > 1 {
        path += &format!("[{element}]");
    }
    let place = FieldPlace { path, kind: text(field, "type"), offset: offset + element * size, bytes: size };
    match inner_structure(field) {
        Some(inner) if own_bytes(inner) == size => locate(inner, at, place),
        _ => place,
    }
}

/// The description of a field's inner structure. Fields of the type `tmp` contain it directly.
fn inner_structure(field: &Value) -> Option<&Value> {
    field.get("struct").or_else(|| field.get("fields").map(|_| field))
}

/// Sum of the bytes of a structure's own fields and subsections.
fn own_bytes(structure: &Value) -> u64 {
    let fields = members(structure, "fields").iter().map(|field| {
        let (size, count) = extent(field);
        size.saturating_mul(count)
    });
    let subsections = members(structure, "subsections")
        .iter()
        .map(|inner| own_bytes(inner).saturating_add(6 + text(inner, "vmsd_name").len() as u64));
    fields.chain(subsections).fold(0, u64::saturating_add)
}

/// Size of one element in bytes, and the number of elements.
fn extent(field: &Value) -> (u64, u64) {
    let number = |key| field.get(key).and_then(Value::as_u64);
    (number("size").unwrap_or(0), number("array_len").unwrap_or(1))
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn members<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"configuration": {"vmsd_name": "configuration", "version": 1,
          "fields": [{"name": "len", "size": 4}, {"name": "name", "size": 2}],
          "subsections": [{"vmsd_name": "configuration/x", "fields": [{"name": "y", "size": 3}]}]},
        "page_size": 4096, "devices": [{"name": "cpu", "instance_id": 1, "vmsd_name": "cpu", "version": 12,
          "fields": [
            {"name": "regs", "array_len": 4, "type": "uint64", "size": 8},
            {"name": "segs", "array_len": 2, "type": "struct", "size": 12, "struct": {"fields": [
                {"name": "selector", "type": "uint32", "size": 4}, {"name": "base", "type": "uint64", "size": 8}]}},
            {"name": "odd", "type": "struct", "size": 3, "struct": {"fields": [{"name": "a", "size": 8}]}},
            {"name": "e", "index": 7, "type": "uint8", "size": 1}],
          "subsections": [{"vmsd_name": "cpu/s", "version": 1, "fields": [{"name": "m", "type": "u", "size": 8}]}]}]}"#;

    #[test]
    fn locate_any_byte_names_its_field() {
        let description = Description::parse(TEXT).unwrap();
        let cpu = &description.devices()[0];

        let names: Vec<_> =
            [0, 31, 32, 37, 44, 56, 59, 60, 71].map(|at| cpu.locate(at).path).into_iter().collect();

        assert_eq!((cpu.length_bytes, cpu.version), (32 + 24 + 3 + 1 + 11 + 8, Some(12)));
        assert_eq!(
            names,
            [
                "regs[0]",
                "regs[3]",
                "segs[0].selector",
                "segs[0].base",
                "segs[1].selector",
                "odd",
                "e[7]",
                "cpu/s",
                "cpu/s.m"
            ]
        );
    }

    #[test]
    fn section_of_the_older_interface_is_described_without_a_version() {
        let text = r#"{"page_size": 4096, "devices": [{"name": "slirp", "instance_id": 0, "size": 131,
            "fields": [{"name": "data", "size": 131, "type": "buffer"}]}]}"#;

        assert_eq!(Description::parse(text).unwrap().devices()[0].version, None);
    }

    #[test]
    fn field_by_name_has_its_offset() {
        let description = Description::parse(TEXT).unwrap();
        let cpu = &description.devices()[0];

        let (segs, count) = cpu.field("segs").unwrap();
        let base = cpu.nested("segs", 1, "base").unwrap();

        assert_eq!((segs.offset, segs.bytes, count), (32, 24, 2));
        assert_eq!((base.offset, base.bytes), (48, 8));
        assert!(cpu.nested("segs", 2, "base").is_none() && cpu.nested("odd", 0, "a").is_none());
        assert!(cpu.field("none").is_none());
        assert_eq!(description.configuration_bytes(), 6 + 6 + 15 + 3);
        assert_eq!(description.configuration_subsections(), ["configuration/x"]);
    }
}
