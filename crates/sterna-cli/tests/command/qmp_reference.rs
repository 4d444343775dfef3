//! docs/qmp.md: every parameter, capability, command and event, as declared.

use std::fmt::Write as _;

use serde_json::Value;
use sterna_cli::commands::{protect, relay};
use sterna_cli::host::GUEST_COMMANDS;
use sterna_qmp::migration::events::EVENTS;
use sterna_qmp::migration::{
    CAPABILITIES, COMMANDS, CapabilitySet, CapabilitySpec, Change, HUMAN_COMMANDS, PARAMETERS, ParameterSpec,
    Range, Support, Unit,
};
use sterna_qmp::server::{BUILTIN_COMMANDS, CommandSpec, EventSpec, MemberKind, MemberSpec};
use sterna_qmp::standby;

const HEAD: &str = "# QMP reference

Everything that Sterna's monitors answer. This page is generated from the declarations in the code: change those, then run
`STERNA_BLESS=1 cargo test --workspace --test command page_says_what_is_declared`.

Names that begin with `x-sterna-` or `X_STERNA_` are Sterna's own, and so are those of `sterna relay`. All others are QEMU 11's, with QEMU's
types and units.
specs/stream.md §8 describes the differences in behaviour. *Since* is a version of Sterna.
";

/// Of a parameter or a capability.
fn change(change: Change) -> &'static str {
    match change {
        Change::Live => "live",
        Change::Harmless => "any time",
        Change::Frozen => "fixed",
    }
}

fn quoted<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

/// A number of bytes that is a whole number of a larger unit is shown in that.
fn number(number: u64, unit: Unit) -> String {
    let is_size = matches!(unit, Unit::Bytes | Unit::BytesPerSecond | Unit::BytesPerSecondBare);
    if number == u64::MAX {
        return "2^64-1".into();
    }
    let sizes = [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let size = sizes.iter().find(|(shift, _)| number > 0 && number.trailing_zeros() >= *shift);
    match size.filter(|_| is_size) {
        Some((shift, name)) => format!("{} {name}", number >> shift),
        None => number.to_string(),
    }
}

fn values(spec: &ParameterSpec) -> String {
    let number = |of| number(of, spec.unit);
    match spec.range {
        Range::Integer { least, greatest } => format!("{} to {}", number(least), number(greatest)),
        Range::PowerOfTwo { least, greatest } => {
            format!("powers of two, {} to {}", number(least), number(greatest))
        }
        Range::Limit { least } => format!("0, or at least {}", number(least)),
        Range::Boolean => "boolean".into(),
        Range::Word(words) => quoted(words.iter().copied()),
        Range::Text => "text".into(),
    }
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::None => "",
        Unit::Bytes => "bytes",
        Unit::BytesPerSecond | Unit::BytesPerSecondBare => "bytes/s",
        Unit::Milliseconds => "ms",
        Unit::Megabytes => "MB/s",
        Unit::Percent => "%",
    }
}

fn parameters(page: &mut String) {
    line(page, "\n## Parameters\n");
    line(
        page,
        "`migrate-set-parameters` sets them, `query-migrate-parameters` shows them. `sterna migrate --set NAME=VALUE` sets them for one migration.",
    );
    line(
        page,
        "*Live*: a running migration follows a change. *Fixed*: refused while a migration runs or is waited for.",
    );
    line(page, "*Any time*: allowed, and read when it is needed next.\n");
    line(page, "| name | values | unit | default | may change | since | meaning |");
    line(page, "| --- | --- | --- | --- | --- | --- | --- |");
    for spec in PARAMETERS {
        let default = match spec.default_value() {
            Value::String(word) if word.is_empty() => "empty".into(),
            Value::String(word) => format!("`{word}`"),
            Value::Number(of) => number(of.as_u64().unwrap_or(0), spec.unit),
            other => other.to_string(),
        };
        let only = spec.only_for.map_or(String::new(), |only| format!(" Only for `{only}`."));
        let ParameterSpec { name, about, since, .. } = spec;
        let (values, unit, change) = (values(spec), unit(spec.unit), change(spec.change));
        line(
            page,
            &format!("| `{name}` | {values} | {unit} | {default} | {change} | {since} | {about}{only} |"),
        );
    }
}

fn capabilities(page: &mut String) {
    line(page, "\n## Capabilities\n");
    line(
        page,
        "`migrate-set-capabilities` switches them, `query-migrate-capabilities` shows them. `sterna migrate --cap NAME` switches them on for one migration.\n",
    );
    line(page, "| name | support | default | may change | since | needs | not together with | meaning |");
    line(page, "| --- | --- | --- | --- | --- | --- | --- | --- |");
    let defaults = CapabilitySet::default();
    for spec in CAPABILITIES {
        let CapabilitySpec { name, about, since, .. } = spec;
        let support = match spec.support {
            Support::Works => "works",
            Support::Harmless => "no effect",
            Support::Missing => "refused",
        };
        let default = if defaults.get(name) { "on" } else { "off" };
        let (needs, excludes) = (quoted(spec.needs()), quoted(spec.excludes()));
        let change = change(spec.change);
        line(
            page,
            &format!(
                "| `{name}` | {support} | {default} | {change} | {since} | {needs} | {excludes} | {about} |"
            ),
        );
    }
    line(page, "\nWith `x-colo`, `multifd` and `xbzrle` work together.");
}

fn kind(kind: MemberKind) -> String {
    match kind {
        MemberKind::Word(words) => quoted(words.iter().copied()),
        MemberKind::List(members) if !members.is_empty() => "list of objects".into(),
        other => other.as_str().into(),
    }
}

/// Rows, each member followed by its own.
fn members(page: &mut String, of: &[MemberSpec], before: &str) {
    for member in of {
        let MemberSpec { name, about, .. } = member;
        let optional = if member.optional { ", optional" } else { "" };
        // The page has them in a table of their own.
        let words = match member.kind {
            MemberKind::Word(words) if words.len() == CAPABILITIES.len() => "a capability".into(),
            other => kind(other),
        };
        line(page, &format!("| `{before}{name}` | {words}{optional} | {about} |"));
        match member.kind {
            MemberKind::Members(inner) => members(page, inner, &format!("{before}{name}.")),
            MemberKind::List(inner) => members(page, inner, &format!("{before}{name}[].")),
            _ => {}
        }
    }
}

fn commands(page: &mut String, of: &[CommandSpec]) {
    for CommandSpec { name, about, arguments, returns, since } in of {
        line(page, &format!("\n### `{name}`\n\n{about} Since {since}."));
        if is_parameters(arguments) {
            line(page, "\nArguments: the [parameters](#parameters), each of them optional.");
        } else if !arguments.is_empty() {
            line(page, "\n| argument | type | meaning |\n| --- | --- | --- |");
            members(page, arguments, "");
        }
        match returns {
            None => {}
            Some(MemberKind::Members(answer)) if is_parameters(answer) => {
                line(page, "\nReturns the [parameters](#parameters).");
            }
            Some(MemberKind::Members(answer)) => {
                line(page, "\n| member of the answer | type | meaning |\n| --- | --- | --- |");
                members(page, answer, "");
            }
            Some(MemberKind::List(answer)) => {
                line(page, "\n| member of each entry | type | meaning |\n| --- | --- | --- |");
                members(page, answer, "");
            }
            Some(other) => line(page, &format!("\nReturns: {}.", kind(*other))),
        }
    }
}

fn is_parameters(members: &[MemberSpec]) -> bool {
    members.len() == PARAMETERS.len()
}

fn events(page: &mut String) {
    line(page, "\n## Events\n");
    line(page, "Monitors of VMs send all of them, that of a standby only `COLO_EXIT`.");
    events_of(page, EVENTS);
}

fn events_of(page: &mut String, of: &[EventSpec]) {
    for EventSpec { name, about, members: data, only_with, since } in of {
        let only =
            only_with.map_or(String::new(), |only| format!(" Sent only with the capability `{only}`."));
        line(page, &format!("\n### `{name}`\n\n{about}{only} Since {since}."));
        if !data.is_empty() {
            line(page, "\n| member | type | meaning |\n| --- | --- | --- |");
            members(page, data, "");
        }
    }
}

fn human(page: &mut String) {
    line(page, "\n## Human monitor\n");
    line(page, "`human-monitor-command` takes these lines.\n");
    line(page, "| command | does |\n| --- | --- |");
    for command in HUMAN_COMMANDS {
        let text = format!("{} {}", command.name, command.arguments).replace('|', "\\|");
        line(page, &format!("| `{}` | {} |", text.trim(), command.about));
    }
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("a string");
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    parameters(&mut page);
    capabilities(&mut page);
    events(&mut page);
    for (title, of) in [
        ("Commands of every monitor", BUILTIN_COMMANDS),
        ("Commands of a VM", COMMANDS),
        ("Commands of `sterna run` about its test guest", GUEST_COMMANDS),
        ("Commands of a standby", standby::COMMANDS),
        ("Commands of `sterna protect`", protect::COMMANDS),
    ] {
        line(&mut page, &format!("\n## {title}"));
        commands(&mut page, of);
    }
    line(
        &mut page,
        "\n## Commands of `sterna relay`\n\nA relay has no VM, and no QEMU has such a monitor. Therefore its names have no prefix.",
    );
    commands(&mut page, relay::COMMANDS);
    line(&mut page, "\n## Events of `sterna relay`");
    events_of(&mut page, relay::EVENTS);
    human(&mut page);
    page
}

#[test]
fn page_says_what_is_declared() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/qmp.md");
    let page = page();
    if std::env::var_os("STERNA_BLESS").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let known = std::fs::read_to_string(path).expect("docs/qmp.md can be read");
    for (at, (now, known)) in page.lines().zip(known.lines()).enumerate() {
        assert_eq!(now, known, "docs/qmp.md:{} is out of date; write it with STERNA_BLESS=1", at + 1);
    }
    assert_eq!(page.len(), known.len(), "docs/qmp.md is out of date; write it with STERNA_BLESS=1");
}

/// Cells with a bar, or without a sentence, spoil the page.
#[test]
fn every_declaration_has_a_sentence_that_fits_into_a_table() {
    let commands =
        [BUILTIN_COMMANDS, COMMANDS, GUEST_COMMANDS, standby::COMMANDS, protect::COMMANDS, relay::COMMANDS]
            .concat();
    let sentences = PARAMETERS
        .iter()
        .map(|spec| (spec.name, spec.about))
        .chain(CAPABILITIES.iter().map(|spec| (spec.name, spec.about)))
        .chain(commands.iter().map(|spec| (spec.name, spec.about)))
        .chain(EVENTS.iter().chain(relay::EVENTS).map(|spec| (spec.name, spec.about)));
    for (name, about) in sentences {
        assert!(about.ends_with(['.', ')']) && !about.contains(['|', '\n']), "{name}: {about}");
        assert!(about.split_whitespace().count() <= 30, "{name}: {about}");
    }
}
