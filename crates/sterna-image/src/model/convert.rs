//! Changes the form of a shape.
//!
//! The form affects the capabilities, and the description's part about them (`specs/mapped-ram.md §1.2`, `§1.6`).

use std::ops::Range;

use sterna_wire::main::Configuration;

use super::Shape;
use super::shape::MAPPED_RAM;
use crate::format::Form;

impl Shape {
    /// This machine in a stream of form `form`.
    ///
    /// The capability `mapped-ram` is added or removed, and the member `configuration` of the description is
    /// rewritten to match. Everything else stays unchanged.
    #[must_use]
    pub fn for_form(&self, form: Form) -> Shape {
        let mut shape = self.clone();
        if self.form() == form {
            return shape;
        }
        match form {
            // QEMU's order of capabilities puts this one last (§1.2).
            Form::Mapped => shape.configuration.capabilities.push(MAPPED_RAM.to_owned()),
            Form::Legacy => shape.configuration.capabilities.retain(|name| name != MAPPED_RAM),
        }
        // The list of capabilities is part of the configuration. Therefore a configuration must exist.
        shape.has_configuration |= form == Form::Mapped;
        for block in &mut shape.ram.blocks {
            // mapped-ram excludes postcopy, which adds the host's page size (§2.1).
            block.host_page_bytes = if form == Form::Mapped { None } else { block.host_page_bytes };
        }
        if let Some(description) = &mut shape.description
            && let Some(span) = member(description, b"configuration")
        {
            description.splice(span, describe(&shape.configuration).into_bytes());
        }
        shape
    }
}

/// The member `configuration` in QEMU's spelling.
fn describe(configuration: &Configuration) -> String {
    let field = |name: &str, count: usize, kind: &str, size: usize| match count {
        1 => format!(r#"{{"name": "{name}", "type": "{kind}", "size": {size}}}"#),
        _ => format!(r#"{{"name": "{name}", "array_len": {count}, "type": "{kind}", "size": {size}}}"#),
    };
    let subsection = |name: &str, fields: &[String]| {
        let fields = fields.join(", ");
        format!(r#"{{"vmsd_name": "configuration/{name}", "version": 1, "fields": [{fields}]}}"#)
    };
    let mut subsections = Vec::new();
    if configuration.target_page_bits.is_some() {
        subsections.push(subsection("target-page-bits", &[field("target_page_bits", 1, "uint32", 4)]));
    }
    if let [first, ..] = &configuration.capabilities[..] {
        let count = configuration.capabilities.len();
        // For a list of several capabilities, QEMU writes the size of the first one.
        let list = field("capabilities", count, "capability", 1 + first.len());
        subsections.push(subsection("capabilities", &[field("caps_count", 1, "uint32", 4), list]));
    }
    if configuration.uuid.is_some() {
        subsections.push(subsection("uuid", &[field("uuid.data", 16, "uint8", 1)]));
    }
    let fields = [field("len", 1, "uint32", 4), field("name", 1, "buffer", configuration.machine_type.len())];
    let mut text =
        format!(r#"{{"vmsd_name": "configuration", "version": 1, "fields": [{}]"#, fields.join(", "));
    if !subsections.is_empty() {
        text += &format!(r#", "subsections": [{}]"#, subsections.join(", "));
    }
    text + "}"
}

/// The range of the value of the member `key` in the object `json`.
///
/// `None` if the member is missing, its value is not an object, or the text is not JSON.
fn member(json: &[u8], key: &[u8]) -> Option<Range<usize>> {
    let mut depth = 0usize;
    let mut at = 0;
    let mut found = None;
    while at < json.len() {
        match json[at] {
            b'"' => {
                let end = end_of_text(json, at)?;
                let mut after = end;
                while json.get(after)?.is_ascii_whitespace() {
                    after += 1;
                }
                if depth == 1 && json[after] == b':' && &json[at + 1..end - 1] == key {
                    let value = &json[after + 1..];
                    let start =
                        after + 1 + value.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
                    if json.get(start) != Some(&b'{') {
                        return None;
                    }
                    found = Some(start);
                }
                at = end;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        at += 1;
        let ended = matches!(json[at - 1], b'}' | b']') && depth == 1;
        if ended && let Some(start) = found {
            return Some(start..at);
        }
    }
    None
}

/// Returns the offset after the text that starts at `at`.
fn end_of_text(json: &[u8], at: usize) -> Option<usize> {
    let mut end = at + 1;
    loop {
        match json.get(end)? {
            b'"' => return Some(end + 1),
            b'\\' => end += 2,
            _ => end += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe_two_capabilities_and_uuid_is_what_qemu_writes() {
        let configuration = Configuration {
            machine_type: "none".to_owned(),
            target_page_bits: None,
            capabilities: vec!["x-ignore-shared".to_owned(), MAPPED_RAM.to_owned()],
            uuid: Some([7; 16]),
        };

        let text = describe(&configuration);

        assert_eq!(
            text,
            r#"{"vmsd_name": "configuration", "version": 1, "fields": [{"name": "len", "type": "uint32", "size": 4}, {"name": "name", "type": "buffer", "size": 4}], "subsections": [{"vmsd_name": "configuration/capabilities", "version": 1, "fields": [{"name": "caps_count", "type": "uint32", "size": 4}, {"name": "capabilities", "array_len": 2, "type": "capability", "size": 16}]}, {"vmsd_name": "configuration/uuid", "version": 1, "fields": [{"name": "uuid.data", "array_len": 16, "type": "uint8", "size": 1}]}]}"#
        );
    }

    #[test]
    fn member_is_found_wherever_it_stands_and_only_at_the_top() {
        let json = br#"{"a": [{"configuration": {"x": 1}}], "b": "configuration\"", "configuration" : {"y": {}}, "c": 1}"#;

        let span = member(json, b"configuration").unwrap();

        assert_eq!(&json[span], br#"{"y": {}}"#);
        for broken in
            [&b""[..], b"{", b"{\"configuration", b"{\"configuration\"", b"]}", b"{\"configuration\": 3}"]
        {
            assert_eq!(member(broken, b"configuration"), None);
        }
        // A value without braces has no closing bracket that could mark its end.
        for scalar in ["3", "\"text\"", "null", "[{}]"] {
            let json = format!("{{\"configuration\": {scalar}, \"devices\": [{{\"a\": 1}}]}}");
            assert_eq!(member(json.as_bytes(), b"configuration"), None, "{scalar}");
        }
    }
}
