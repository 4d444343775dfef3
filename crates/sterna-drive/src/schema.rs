//! The commands and arguments that a monitor knows, by its own description (`query-qmp-schema`).
//!
//! An older QEMU refuses an unknown command or argument with an error text that differs between releases. So a job
//! checks the schema first and uses only known ones.

use std::collections::HashMap;

use serde_json::Value;

/// Commands and the names of their arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schema {
    commands: HashMap<String, Vec<String>>,
}

impl Schema {
    /// Reads an answer to `query-qmp-schema`.
    pub fn parse(answer: &Value) -> Self {
        let entries = || answer.as_array().into_iter().flatten();
        let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
        let members: HashMap<&str, &Value> = entries()
            .filter(|entry| entry["meta-type"] == "object")
            .filter_map(|entry| Some((entry["name"].as_str()?, &entry["members"])))
            .collect();
        let commands = entries().filter(|entry| entry["meta-type"] == "command").map(|entry| {
            let arguments = entry["arg-type"].as_str().and_then(|of| members.get(of));
            let arguments =
                arguments.and_then(|list| list.as_array()).into_iter().flatten().map(name).collect();
            (name(entry), arguments)
        });
        Self { commands: commands.collect() }
    }

    /// Whether the monitor knows the command. True if the monitor does not describe itself.
    pub fn has(&self, command: &str) -> bool {
        self.commands.is_empty() || self.commands.contains_key(command)
    }

    /// Whether the command has the argument. True if the monitor does not describe itself.
    pub fn takes(&self, command: &str, argument: &str) -> bool {
        self.commands.is_empty()
            || self.commands.get(command).is_some_and(|known| known.iter().any(|name| name == argument))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schema_of_a_description_knows_commands_and_their_arguments() {
        let answer = json!([
            {"name": "calc-dirty-rate", "meta-type": "command", "arg-type": "7", "ret-type": "0"},
            {"name": "stop", "meta-type": "command", "arg-type": "0", "ret-type": "0"},
            {"name": "7", "meta-type": "object", "members": [{"name": "calc-time", "type": "int"},
                {"name": "mode", "default": null, "type": "8"}]},
            {"name": "0", "meta-type": "object", "members": []},
            {"name": "STOP", "meta-type": "event", "arg-type": "0"},
        ]);

        let schema = Schema::parse(&answer);

        assert!(schema.has("stop") && !schema.has("STOP") && !schema.has("calc-time"));
        assert!(schema.takes("calc-dirty-rate", "mode"));
        assert!(!schema.takes("calc-dirty-rate", "calc-time-unit") && !schema.takes("stop", "mode"));
    }

    #[test]
    fn schema_of_a_monitor_that_does_not_describe_itself_forbids_nothing() {
        let schema = Schema::parse(&json!({}));

        assert!(schema.has("anything") && schema.takes("anything", "whatever"));
    }
}
