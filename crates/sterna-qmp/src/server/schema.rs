//! `query-qmp-schema`: what this server takes, in the form in which QEMU describes itself.
//!
//! Truthful rather than complete: commands with their arguments' names and JSON types, and events' names.
//! What answers and events hold is described as `any`.

use serde_json::{Value, json};

use super::arguments::{ArgumentKind, CommandSpec};

/// The schema of `commands` and `events`.
pub(crate) fn schema(commands: &[CommandSpec], events: &[&'static str]) -> Value {
    let mut entries = vec![
        json!({"name": "str", "meta-type": "builtin", "json-type": "string"}),
        json!({"name": "int", "meta-type": "builtin", "json-type": "int"}),
        json!({"name": "bool", "meta-type": "builtin", "json-type": "boolean"}),
        json!({"name": "any", "meta-type": "builtin", "json-type": "value"}),
        json!({"name": "[any]", "meta-type": "array", "element-type": "any"}),
        json!({"name": "0", "meta-type": "object", "members": []}),
    ];
    for command in commands {
        let arguments = if command.arguments.is_empty() {
            "0".to_owned()
        } else {
            let name = format!("{}-arg", command.name);
            entries.push(json!({"name": name, "meta-type": "object", "members": members(command)}));
            name
        };
        entries.push(json!({
            "name": command.name,
            "meta-type": "command",
            "arg-type": arguments,
            "ret-type": "any",
            "allow-oob": false,
        }));
    }
    entries.extend(events.iter().map(|name| json!({"name": name, "meta-type": "event", "arg-type": "0"})));
    Value::Array(entries)
}

fn members(command: &CommandSpec) -> Vec<Value> {
    let member = |argument: &super::arguments::ArgumentSpec| {
        let kind = match argument.kind {
            ArgumentKind::String => "str",
            ArgumentKind::Integer => "int",
            ArgumentKind::Boolean => "bool",
            ArgumentKind::Array => "[any]",
            ArgumentKind::Object | ArgumentKind::Any => "any",
        };
        let mut member = json!({"name": argument.name, "type": kind});
        if let (true, Some(member)) = (argument.optional, member.as_object_mut()) {
            member.insert("default".into(), Value::Null);
        }
        member
    };
    command.arguments.iter().map(member).collect()
}
