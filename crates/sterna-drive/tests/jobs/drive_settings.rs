//! Tests settings that last for one job, and settings that must be equal on both sides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::{Map, Value, json};
use sterna_drive::{DriveError, Temporary, Vm, Wanted, agree, readiness};
use sterna_qmp::ClientError;

use super::drive::{Answer, Asked, monitor};

/// A simulated QEMU that stores its settings.
#[derive(Clone)]
struct Machine(Arc<Mutex<State>>);

#[derive(Clone, PartialEq, Debug)]
struct State {
    capabilities: BTreeMap<String, bool>,
    parameters: Map<String, Value>,
    objects: Vec<String>,
    /// The answer to `query-migrate`.
    migration: Value,
    status: &'static str,
    /// (command, count): the command is refused this number of times.
    refused: (&'static str, u32),
}

impl Machine {
    fn new() -> Self {
        let names =
            ["multifd", "postcopy-ram", "postcopy-preempt", "switchover-ack", "return-path", "xbzrle"];
        let parameters = json!({"max-bandwidth": 77, "multifd-channels": 2, "multifd-compression": "none", "tls-creds": ""});
        Self(Arc::new(Mutex::new(State {
            capabilities: names.map(|name| (name.to_owned(), false)).into_iter().collect(),
            parameters: parameters.as_object().unwrap().clone(),
            objects: Vec::new(),
            migration: json!({}),
            status: "running",
            refused: ("", 0),
        })))
    }

    fn with(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.0.lock().unwrap());
        self
    }

    fn on(self, names: &[&str]) -> Self {
        self.with(|state| state.capabilities.extend(names.iter().map(|name| ((*name).to_owned(), true))))
    }

    fn set(self, name: &str, value: Value) -> Self {
        self.with(|state| drop(state.parameters.insert(name.to_owned(), value)))
    }

    fn state(&self) -> State {
        self.0.lock().unwrap().clone()
    }

    fn vm(&self, at: &str) -> (Vm, Asked) {
        let machine = self.clone();
        monitor(at, "", move |command, arguments| {
            let state = &mut *machine.0.lock().unwrap();
            if state.refused.0 == command && state.refused.1 > 0 {
                state.refused.1 -= 1;
                return Answer::Refuse("not now");
            }
            let id = || arguments["id"].as_str().unwrap().to_owned();
            match command {
                "migrate-set-capabilities" => {
                    for change in arguments["capabilities"].as_array().unwrap() {
                        let name = change["capability"].as_str().unwrap().to_owned();
                        state.capabilities.insert(name, change["state"].as_bool().unwrap());
                    }
                }
                "migrate-set-parameters" => state.parameters.extend(arguments.as_object().unwrap().clone()),
                "object-add" => state.objects.push(id()),
                "object-del" if !state.objects.contains(&id()) => return Answer::Refuse("no such object"),
                "object-del" => state.objects.retain(|object| *object != id()),
                _ => {}
            }
            Answer::Return(match command {
                "query-migrate-capabilities" => state
                    .capabilities
                    .iter()
                    .map(|(name, state)| json!({"capability": name, "state": state}))
                    .collect(),
                "query-migrate-parameters" => state.parameters.clone().into(),
                "query-migrate" => state.migration.clone(),
                "query-status" => json!({"status": state.status}),
                _ => json!({}),
            })
        })
    }
}

fn parameters(pairs: &[(&str, Value)]) -> Map<String, Value> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

#[test]
fn temporary_settings_are_put_back_whichever_of_them_were_made() {
    let machine = Machine::new().on(&["xbzrle"]);
    let (mut vm, _) = machine.vm("VM");
    let before = machine.state();
    let mut settings = Temporary::begin(&mut vm).unwrap();

    settings.switch(&mut vm, &[("multifd", true), ("xbzrle", false), ("no-such-thing", true)]).unwrap();
    settings.switch(&mut vm, &[("return-path", true)]).unwrap();
    settings.add_object(&mut vm, "creds", Map::from_iter([("id".into(), "creds".into())])).unwrap();
    settings
        .set(&mut vm, &parameters(&[("tls-creds", "creds".into()), ("max-bandwidth", 5.into())]))
        .unwrap();
    assert_ne!(machine.state(), before);
    for name in ["multifd", "xbzrle", "return-path", "tls-creds", "max-bandwidth", "creds"] {
        assert!(settings.names().contains(name), "{name} in {}", settings.names());
    }

    settings.put_back(&mut vm).unwrap();

    assert_eq!(machine.state(), before);
}

#[test]
fn temporary_settings_that_were_refused_are_not_put_back() {
    let machine = Machine::new().with(|state| state.refused = ("migrate-set-parameters", 1));
    let (mut vm, asked) = machine.vm("VM");
    let mut settings = Temporary::begin(&mut vm).unwrap();

    let refused = settings.set(&mut vm, &parameters(&[("max-bandwidth", 5.into())]));

    assert!(matches!(refused, Err(ClientError::Refused { .. })));
    assert_eq!(settings.names(), "");
    settings.put_back(&mut vm).unwrap();
    assert_eq!(asked.count("migrate-set-parameters"), 1);
}

#[test]
fn put_back_repeats_what_is_refused_for_a_moment_and_tries_every_step() {
    for (command, times, is_whole) in [
        ("migrate-set-parameters", 3, true),
        ("object-del", 100_000, false),
        ("migrate-set-parameters", 100_000, false),
    ] {
        let machine = Machine::new();
        let (mut vm, _) = machine.vm("VM");
        let mut settings = Temporary::begin(&mut vm).unwrap();
        settings.switch(&mut vm, &[("multifd", true)]).unwrap();
        settings.add_object(&mut vm, "creds", Map::from_iter([("id".into(), "creds".into())])).unwrap();
        settings.set(&mut vm, &parameters(&[("max-bandwidth", 5.into())])).unwrap();
        let machine = machine.with(|state| state.refused = (command, times));

        let done = settings.put_back(&mut vm);

        assert_eq!(done.is_ok(), is_whole, "{command}");
        let state = machine.state();
        assert!(!state.capabilities["multifd"], "{command}");
        assert_eq!(state.objects.is_empty(), command != "object-del", "{command}");
    }
}

#[test]
fn text_that_was_not_set_is_put_back_as_the_empty_text() {
    let machine = Machine::new().with(|state| drop(state.parameters.remove("tls-creds")));
    let (mut vm, _) = machine.vm("VM");
    let mut settings = Temporary::begin(&mut vm).unwrap();
    settings.set(&mut vm, &parameters(&[("tls-creds", "creds".into())])).unwrap();

    settings.put_back(&mut vm).unwrap();

    assert_eq!(machine.state().parameters["tls-creds"], "");
}

#[test]
fn capability_that_the_operator_switches_off_is_off_at_both_sides() {
    let multifd = || Machine::new().on(&["multifd"]);

    compared(multifd(), Machine::new(), &["multifd=off"], false).unwrap();
    compared(Machine::new(), multifd(), &["multifd", "multifd=off"], false).unwrap();
    assert!(compared(multifd(), Machine::new(), &[], false).is_err());
    assert!(compared(Machine::new(), Machine::new(), &["multifd"], false).is_ok());
}

/// Compares two machines, with the capabilities of the command line: `NAME`, or `NAME=off`.
fn compared(
    source: Machine,
    destination: Machine,
    capabilities: &[&str],
    has_tls: bool,
) -> Result<(), String> {
    let ((mut from, here), (mut to, there)) = (source.vm("SOURCE"), destination.vm("DEST"));
    let state = |cap: &&str| match cap.strip_suffix("=off") {
        Some(name) => (name.to_owned(), false),
        None => ((*cap).to_owned(), true),
    };
    let capabilities: Vec<_> = capabilities.iter().map(state).collect();
    let wanted = Wanted { capabilities: &capabilities, parameters: &Map::new(), has_tls };
    let result = agree::compare(&mut from, &mut to, wanted);
    for command in ["migrate-set-parameters", "migrate-set-capabilities"] {
        assert_eq!(here.count(command) + there.count(command), 0, "nothing is changed");
    }
    result.map_err(|error| match error {
        DriveError::Unfit(why) => why,
        other => panic!("{other:?}"),
    })
}

#[test]
fn settings_on_which_the_stream_depends_are_compared_in_both_directions() {
    let plain = Machine::new;
    let multifd = |channels: u64| plain().on(&["multifd"]).set("multifd-channels", channels.into());
    for (from, to, words) in [
        (plain(), plain(), &[][..]),
        (multifd(2), plain(), &["multifd is on at SOURCE and off at DEST", "`--cap multifd`"]),
        (plain(), multifd(2), &["multifd is off at SOURCE and on at DEST"]),
        (
            multifd(4),
            multifd(2),
            &["multifd-channels is 4 at SOURCE and 2 at DEST", "--set multifd-channels=4"],
        ),
        (multifd(4), multifd(4), &[]),
        // Without multifd, no channels are opened.
        (plain().set("multifd-channels", 4.into()), plain(), &[]),
        (multifd(2).set("multifd-compression", "zstd".into()), multifd(2), &["multifd-compression is zstd"]),
        (plain().on(&["postcopy-ram"]), plain(), &["postcopy-ram is on at SOURCE"]),
        (plain(), plain().on(&["postcopy-ram"]), &[]),
        (
            plain().on(&["postcopy-ram"]),
            plain().on(&["postcopy-ram", "postcopy-preempt"]),
            &["postcopy-preempt is off"],
        ),
        (plain(), plain().on(&["postcopy-ram", "postcopy-preempt"]), &[]),
        (plain().on(&["switchover-ack"]), plain(), &["switchover-ack is on at SOURCE"]),
        // Each side can read streams with and without xbzrle.
        (plain().on(&["xbzrle"]), plain(), &[]),
        (
            plain().set("tls-creds", "tls0".into()),
            plain(),
            &["TLS (tls-creds) is on at SOURCE and off at DEST"],
        ),
        (plain(), plain().set("tls-creds", "tls0".into()), &["TLS (tls-creds) is off at SOURCE"]),
    ] {
        let result = compared(from, to, &[], false);

        assert_eq!(result.is_ok(), words.is_empty(), "{words:?}: {result:?}");
        for word in words {
            assert!(result.as_ref().unwrap_err().contains(word), "{word} in {result:?}");
        }
    }
}

#[test]
fn settings_of_the_command_line_count_for_both_sides_unless_the_destination_listens() {
    compared(Machine::new(), Machine::new(), &["multifd", "postcopy-ram"], true).unwrap();
    let address = json!([{"type": "inet", "host": "127.0.0.1", "port": "4444"}]);
    for migration in [json!({"status": "setup"}), json!({"socket-address": address})] {
        let listens = Machine::new().with(|state| state.migration = migration);
        let refused = compared(Machine::new(), listens, &["multifd"], false).unwrap_err();
        assert!(refused.contains("DEST listens already"), "{refused}");
    }
}

#[test]
fn guest_that_cannot_leave_is_refused_with_the_reason() {
    for (status, migration, word) in [
        ("inmigrate", json!({}), "has no guest to migrate"),
        ("postmigrate", json!({"status": "completed"}), "was migrated or saved before"),
        ("running", json!({"status": "active"}), "already migrates (`active`)"),
    ] {
        let (mut vm, _) =
            Machine::new().with(|state| (state.status, state.migration) = (status, migration)).vm("VM");
        let refused = readiness::may_leave(&mut vm, "migrate").unwrap_err();
        assert!(matches!(refused, DriveError::Unfit(_)) && refused.to_string().contains(word), "{refused}");
    }
    let blocked = json!({"blocked-reasons": ["The device x does not support migration."]});
    let (mut vm, _) = Machine::new().with(|state| state.migration = blocked).vm("VM");
    assert_eq!(readiness::may_leave(&mut vm, "migrate").unwrap(), "running");
    let refused = readiness::refuse_blocked(&mut vm).unwrap_err().to_string();
    assert!(refused.contains("VM") && refused.contains("device x does not support"), "{refused}");
}
