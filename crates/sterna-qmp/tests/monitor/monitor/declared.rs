//! Tests that every declared command and event is executed, described, and answered as declared.

use serde_json::{Map, Value, json};
use sterna_qmp::ClientError;
use sterna_qmp::migration::events::EVENTS;
use sterna_qmp::migration::{COMMANDS, events};
use sterna_qmp::server::{BUILTIN_COMMANDS, CommandSpec, MemberKind, MemberSpec};

use super::support::{ClientExt, Monitor};

/// The minimal arguments of a command.
fn least(command: &CommandSpec) -> Value {
    let value = |kind| match kind {
        MemberKind::Integer | MemberKind::Number => json!(1),
        MemberKind::Boolean => json!(true),
        MemberKind::Array | MemberKind::List(_) => json!([]),
        MemberKind::Object | MemberKind::Members(_) => json!({}),
        MemberKind::Word(words) => json!(words[0]),
        _ => json!("x"),
    };
    let required = command.arguments.iter().filter(|argument| !argument.optional);
    required.map(|argument| (argument.name.to_owned(), value(argument.kind))).collect::<Map<_, _>>().into()
}

/// A debug build compares each answer with its declaration, and ends the connection if they differ.
#[test]
fn every_declared_command_is_executed_and_answers_as_declared() {
    for command in COMMANDS {
        for monitor in [Monitor::running(), Monitor::waiting(true)] {
            let mut client = monitor.client();
            match client.execute(command.name, least(command)) {
                Ok(_) => {}
                Err(ClientError::Refused { desc, .. }) => {
                    assert!(!desc.contains("has not been found"), "{}: {desc}", command.name);
                }
                Err(other) => panic!("{}: {other}", command.name),
            }
        }
    }
}

#[test]
fn no_name_is_declared_twice() {
    let mut names: Vec<_> = BUILTIN_COMMANDS.iter().chain(COMMANDS).map(|command| command.name).collect();
    names.extend(EVENTS.iter().map(|event| event.name));
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn schema_has_the_words_of_parameters_and_the_members_of_events() {
    let mut client = Monitor::running().client_of();
    let schema = client.1.ok("query-qmp-schema", Value::Null);
    let entry =
        |name: &Value| schema.as_array().unwrap().iter().find(|entry| entry["name"] == *name).unwrap();
    let member = |object: &Value, name: &str| {
        let members = entry(object)["members"].as_array().unwrap();
        members.iter().find(|member| member["name"] == name).unwrap()["type"].clone()
    };

    let arguments = &entry(&json!("migrate-set-parameters"))["arg-type"];
    let mode = entry(&member(arguments, "mode"));
    assert_eq!(mode["values"], json!(["normal", "cpr-transfer"]));
    assert_eq!(member(arguments, "tls-creds"), "StrOrNull");
    assert_eq!(member(arguments, "downtime-limit"), "int");
    let pass = &entry(&json!("MIGRATION_PASS"))["arg-type"];
    assert_eq!(member(pass, "pass"), "int");
    let stop = &entry(&json!("STOP"))["arg-type"];
    assert_eq!(entry(stop)["members"], json!([]));
}

#[test]
fn undeclared_data_is_found() {
    let pass = events::MIGRATION_PASS;
    assert_eq!(pass.undeclared(Some(&json!({"pass": 1}))), None);
    for data in [json!({}), json!({"pass": "1"}), json!({"pass": 1, "more": 1})] {
        assert!(pass.undeclared(Some(&data)).is_some(), "{data}");
    }
    assert!(pass.undeclared(None).is_some());

    const INNER: &[MemberSpec] = &[MemberSpec::required("word", MemberKind::Word(&["a", "b"]), "")];
    let list = CommandSpec::new("list", "").returns(MemberKind::List(INNER));
    assert_eq!(list.undeclared(&json!([{"word": "a"}, {"word": "b"}])), None);
    assert!(list.undeclared(&json!([{"word": "a"}, {"word": "c"}])).is_some());
    assert!(list.undeclared(&json!({})).is_some());
}
