//! Answers `query-qmp-schema`: the declared commands and events, in the format of QEMU's own description.

use serde_json::{Value, json};

use super::spec::{CommandSpec, EventSpec, MemberKind, MemberSpec};

/// The answer to `query-qmp-schema` of a monitor with these commands and events.
pub fn schema(commands: &[CommandSpec], events: &[EventSpec]) -> Value {
    let mut schema = Schema(vec![
        builtin("str", "string"),
        builtin("int", "int"),
        builtin("number", "number"),
        builtin("bool", "boolean"),
        builtin("null", "null"),
        builtin("any", "value"),
        json!({"name": "[any]", "meta-type": "array", "element-type": "any"}),
        json!({"name": EMPTY, "meta-type": "object", "members": []}),
        json!({"name": "StrOrNull", "meta-type": "alternate", "members": [{"type": "str"}, {"type": "null"}]}),
    ]);
    for command in commands {
        let arguments = schema.object(&format!("{}-arg", command.name), command.arguments);
        let answer = match command.returns {
            Some(kind) => schema.kind(&format!("{}-ret", command.name), kind),
            None => EMPTY.to_owned(),
        };
        schema.0.push(json!({
            "name": command.name,
            "meta-type": "command",
            "arg-type": arguments,
            "ret-type": answer,
            "allow-oob": false,
        }));
    }
    for event in events {
        let data = schema.object(&format!("{}-data", event.name), event.members);
        schema.0.push(json!({"name": event.name, "meta-type": "event", "arg-type": data}));
    }
    Value::Array(schema.0)
}

/// Name of the object type without members.
const EMPTY: &str = "0";

/// The entries that were added so far.
struct Schema(Vec<Value>);

impl Schema {
    /// The name of the type of `kind`. Adds the type as `name` if it is missing.
    fn kind(&mut self, name: &str, kind: MemberKind) -> String {
        let known = match kind {
            MemberKind::String => "str",
            MemberKind::StringOrNull => "StrOrNull",
            MemberKind::Integer => "int",
            MemberKind::Number => "number",
            MemberKind::Boolean => "bool",
            MemberKind::Array => "[any]",
            MemberKind::Object | MemberKind::Any => "any",
            MemberKind::Word(words) => {
                let members: Value = words.iter().map(|word| json!({"name": word})).collect();
                self.0.push(json!({"name": name, "meta-type": "enum", "members": members, "values": words}));
                name
            }
            MemberKind::List(members) => {
                let element = self.object(&format!("{name}-element"), members);
                self.0.push(json!({"name": name, "meta-type": "array", "element-type": element}));
                name
            }
            MemberKind::Members(members) => return self.object(name, members),
        };
        known.to_owned()
    }

    fn object(&mut self, name: &str, members: &[MemberSpec]) -> String {
        if members.is_empty() {
            return EMPTY.to_owned();
        }
        let entries: Vec<Value> = members
            .iter()
            .map(|member| {
                let kind = self.kind(&format!("{name}-{}", member.name), member.kind);
                if member.optional {
                    json!({"name": member.name, "type": kind, "default": null})
                } else {
                    json!({"name": member.name, "type": kind})
                }
            })
            .collect();
        self.0.push(json!({"name": name, "meta-type": "object", "members": entries}));
        name.to_owned()
    }
}

fn builtin(name: &str, json: &str) -> Value {
    json!({"name": name, "meta-type": "builtin", "json-type": json})
}
