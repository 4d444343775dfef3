//! What Sterna's monitor declares, and what a real QEMU 11 says of itself: the same names with the same types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sterna_interop::{Failure, Qemu, Root};
use sterna_qmp::migration::events::EVENTS;
use sterna_qmp::migration::{CAPABILITIES, COMMANDS, PARAMETERS};
use sterna_qmp::server::{BUILTIN_COMMANDS, schema};

/// Where the two differ, and why. Each row is needed: one that does not apply any more fails the test.
const DIFFERENCES: &[(&str, &str)] = &[
    ("migrate arg detach: unknown to QEMU", "QEMU 11.1 has removed it; clients of older ones send it"),
    ("migrate-set-parameters arg block-bitmap-mapping: missing", "Sterna has no dirty bitmaps"),
    ("migrate-set-parameters arg cpr-exec-command: missing", "Sterna has no cpr-exec"),
    ("migrate-set-parameters arg mode: lacks cpr-exec, cpr-reboot", "Sterna has neither"),
    ("migrate-continue arg state: lacks postcopy-recover-setup, wait-unplug", "Sterna has no such status"),
    ("object-add arg: other members", "QEMU's depend on the type, which the test of `object-add` covers"),
    ("query-machines arg compat-props: missing", "Sterna's machine has none"),
    ("query-cpus-fast ret qom-type: missing", "Sterna's vCPUs have no type"),
    ("query-block arg flat: missing", "Sterna's answer has no backing chain to leave out"),
    ("query-block ret: other members", "Sterna's disks have few of QEMU's properties"),
];

/// An object's members: the type and whether the member may be absent.
type Object = BTreeMap<String, (Type, bool)>;

#[derive(Debug, Clone, PartialEq)]
enum Type {
    /// A JSON type by its name, or an alternative of some.
    Plain(String),
    Words(BTreeSet<String>),
    /// A list; of objects, if their members are described.
    List(Option<Object>),
    Object(Object),
}

/// A description, by its entries' names.
struct Description<'a>(BTreeMap<&'a str, &'a Value>);

impl<'a> Description<'a> {
    fn new(answer: &'a Value) -> Self {
        let entries = answer.as_array().into_iter().flatten();
        Self(entries.filter_map(|entry| Some((entry["name"].as_str()?, entry))).collect())
    }

    fn entry(&self, name: &str, meta: &str) -> Option<&'a Value> {
        self.0.get(name).copied().filter(|entry| entry["meta-type"] == meta)
    }

    /// The type of this name. Types may contain themselves: below `depth` nothing is looked at.
    fn kind(&self, name: &Value, depth: u32) -> Type {
        let name = name.as_str().unwrap_or_default();
        let entry = self.0.get(name).copied().unwrap_or(&Value::Null);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |name: &str| entry[name].as_array().into_iter().flatten();
        match entry["meta-type"].as_str() {
            Some("enum") => Type::Words(list("members").map(|word| text(&word["name"])).collect()),
            Some("array") => match self.kind(&entry["element-type"], depth) {
                Type::Object(members) if !members.is_empty() => Type::List(Some(members)),
                _ => Type::List(None),
            },
            Some("object") if depth == 0 => Type::Object(Object::new()),
            Some("object") => {
                let member = |member: &Value| {
                    let kind = self.kind(&member["type"], depth - 1);
                    (text(&member["name"]), (kind, member.get("default").is_some()))
                };
                Type::Object(list("members").map(member).collect())
            }
            Some("alternate") => {
                let kinds = list("members").map(|member| match self.kind(&member["type"], depth) {
                    Type::Plain(kind) => kind,
                    other => format!("{other:?}"),
                });
                Type::Plain(kinds.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" or "))
            }
            _ => Type::Plain(text(&entry["json-type"])),
        }
    }
}

/// Whose answer it is: a client that knows QEMU's reads it, or a client sends it.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Sent,
    Read,
}

/// Adds what differs between `ours` and `theirs`.
fn compare(place: &str, ours: &Type, theirs: &Type, direction: Direction, found: &mut Vec<String>) {
    match (ours, theirs) {
        (Type::Object(ours), Type::Object(theirs)) | (Type::List(Some(ours)), Type::List(Some(theirs))) => {
            compare_members(place, ours, theirs, direction, found);
        }
        // Their entries are described on one side alone.
        (Type::List(_), Type::List(_)) => {}
        (Type::Words(ours), Type::Words(theirs)) => {
            let more: Vec<_> = ours.difference(theirs).cloned().collect();
            if !more.is_empty() {
                found.push(format!("{place}: QEMU lacks {}", more.join(", ")));
            }
            let missing: Vec<_> = theirs.difference(ours).cloned().collect();
            // A word that Sterna never answers with needs no entry.
            if direction == Direction::Sent && !missing.is_empty() {
                found.push(format!("{place}: lacks {}", missing.join(", ")));
            }
        }
        (ours, theirs) if ours == theirs => {}
        (ours, theirs) => found.push(format!("{place}: {ours:?}, not {theirs:?}")),
    }
}

fn compare_members(
    place: &str,
    ours: &Object,
    theirs: &Object,
    direction: Direction,
    found: &mut Vec<String>,
) {
    for (name, (kind, is_optional)) in ours {
        let place = format!("{place} {name}");
        match theirs.get(name) {
            None if name.starts_with("x-sterna-") => {}
            // A capability's name and the like are compared as words.
            None => found.push(format!("{place}: unknown to QEMU")),
            Some((_, true)) if direction == Direction::Sent && !is_optional => {
                found.push(format!("{place}: optional in QEMU"));
            }
            Some((_, false)) if direction == Direction::Read && *is_optional => {
                found.push(format!("{place}: always there in QEMU"));
            }
            Some((theirs, _)) => compare(&place, kind, theirs, direction, found),
        }
    }
    for (name, (_, is_optional)) in theirs {
        // Answers without what is optional are as QEMU's can be.
        if !ours.contains_key(name) && (direction == Direction::Sent || !is_optional) {
            found.push(format!("{place} {name}: missing"));
        }
    }
}

/// Without Sterna's own words, which QEMU cannot know.
fn without_own(kind: Type) -> Type {
    let members = |members: Object| {
        let own = |name: &String| name.starts_with("x-sterna-");
        members
            .into_iter()
            .filter(|(name, _)| !own(name))
            .map(|(name, (kind, is_optional))| (name, (without_own(kind), is_optional)))
            .collect()
    };
    match kind {
        Type::Words(words) => {
            Type::Words(words.into_iter().filter(|word| !word.starts_with("x-sterna-")).collect())
        }
        Type::Object(object) => Type::Object(members(object)),
        Type::List(Some(object)) => Type::List(Some(members(object))),
        other => other,
    }
}

/// Everything that differs.
fn differences(ours: &Value, theirs: &Value) -> Vec<String> {
    /// Enough for every argument; some of QEMU's types contain themselves.
    const DEPTH: u32 = 4;
    let (ours, theirs) = (Description::new(ours), Description::new(theirs));
    let mut found = Vec::new();
    let mut types = |place: &str, one: &Value, other: &Value, direction| {
        let (one, other) = (without_own(ours.kind(one, DEPTH)), theirs.kind(other, DEPTH));
        let before = found.len();
        compare(place, &one, &other, direction, &mut found);
        // One row for a command whose members differ altogether.
        let whole = format!("{place}: other members");
        if DIFFERENCES.iter().any(|(known, _)| *known == whole) && found.len() > before {
            found.truncate(before);
            found.push(whole);
        }
    };
    let commands = BUILTIN_COMMANDS.iter().chain(COMMANDS).map(|command| (command.name, "command"));
    let events = EVENTS.iter().map(|event| (event.name, "event"));
    let mut unknown = Vec::new();
    for (name, meta) in commands.chain(events) {
        if name.starts_with("x-sterna-") || name.starts_with("X_STERNA_") {
            continue;
        }
        let Some(our) = ours.entry(name, meta) else { panic!("{name} is not described") };
        let Some(their) = theirs.entry(name, meta) else {
            unknown.push(format!("{name}: unknown to QEMU"));
            continue;
        };
        match meta {
            "command" => {
                types(&format!("{name} arg"), &our["arg-type"], &their["arg-type"], Direction::Sent);
                types(&format!("{name} ret"), &our["ret-type"], &their["ret-type"], Direction::Read);
            }
            _ => types(&format!("{name} data"), &our["arg-type"], &their["arg-type"], Direction::Read),
        }
    }
    found.extend(unknown);
    found
}

#[test]
fn declarations_are_those_of_qemu_but_for_known_differences() -> Result<(), Failure> {
    let test = "declarations_are_those_of_qemu_but_for_known_differences";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut qemu = Qemu::builder(&root).spawn()?;
    let theirs = qemu.execute("query-qmp-schema", Value::Null)?;
    let ours = schema(&[BUILTIN_COMMANDS, COMMANDS].concat(), EVENTS);

    let found: BTreeSet<String> = differences(&ours, &theirs).into_iter().collect();

    let known: BTreeSet<String> = DIFFERENCES.iter().map(|(what, _)| (*what).to_owned()).collect();
    let (new, gone): (Vec<_>, Vec<_>) =
        (found.difference(&known).collect(), known.difference(&found).collect());
    assert!(new.is_empty(), "unknown differences: {new:#?}");
    assert!(gone.is_empty(), "differences that are none: {gone:#?}");
    qemu.quit()
}

#[test]
fn qemu_starts_with_the_declared_values_but_for_the_return_path() -> Result<(), Failure> {
    let test = "qemu_starts_with_the_declared_values_but_for_the_return_path";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut qemu = Qemu::builder(&root).spawn()?;

    let parameters = qemu.execute("query-migrate-parameters", Value::Null)?;
    let capabilities = qemu.execute("query-migrate-capabilities", Value::Null)?;

    for spec in PARAMETERS.iter().filter(|spec| !spec.name.starts_with("x-sterna-")) {
        assert_eq!(parameters[spec.name], spec.default_value(), "{}", spec.name);
    }
    let ours = sterna_qmp::migration::CapabilitySet::default();
    for entry in capabilities.as_array().into_iter().flatten() {
        let name = entry["capability"].as_str().unwrap_or_default();
        assert!(CAPABILITIES.iter().any(|spec| spec.name == name), "{name} is not declared");
        assert_eq!(entry["state"] == true, ours.get(name) && name != "return-path", "{name}");
    }
    qemu.quit()
}
