//! Executes the human monitor's migration commands, for `human-monitor-command`.
//!
//! The output has QEMU's lines and units. An error is also output, after `Error: `. Numbers may have QEMU's suffixes:
//! without a suffix, `max-bandwidth` counts MiB and other sizes count bytes.

mod info;

use std::fmt::Write as _;

use serde_json::{Map, Value};

pub use super::numbers::{parse_number, parse_size};

use super::address;
use super::control::MigrationControl;
use super::declared::declared;
use super::dirty_rate::Order;
use super::numbers::parse_switch;
use super::parameters::parameter;
use crate::error::QmpError;
use crate::server::Context;

/// A command of the human monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HumanCommand {
    /// Name of the command, or `info` with the subject.
    pub name: &'static str,
    /// Syntax of the arguments.
    pub arguments: &'static str,
    /// The effect, in one sentence.
    pub about: &'static str,
}

/// All commands of the human monitor, in the order in which a refusal lists them.
#[rustfmt::skip]
pub const HUMAN_COMMANDS: &[HumanCommand] = &[
    human("info migrate", "[-a]", "Shows `query-migrate`, with `-a` more statistics."),
    human("info migrate_parameters", "", "Shows the parameters."),
    human("info migrate_capabilities", "", "Shows the capabilities."),
    human("info status", "", "Shows the state of the VM."),
    human("info dirty_rate", "", "Shows the last measurement of the dirty rate."),
    human("info vcpu_dirty_limit", "", "Shows the vCPUs' dirty limits."),
    human("calc_dirty_rate", "[-r] [-b] SECONDS [SAMPLE-PAGES]", "Measures the dirty rate: `-r` by a dirty ring, `-b` by a bitmap."),
    human("set_vcpu_dirty_limit", "MB-PER-SECOND [VCPU]", "Limits the dirty rate of one vCPU, or of all."),
    human("cancel_vcpu_dirty_limit", "[VCPU]", "Removes the limit of one vCPU's dirty rate, or of all."),
    human("migrate_set_parameter", "NAME VALUE", "Sets a parameter. Sizes take suffixes; a bare `max-bandwidth` counts MiB."),
    human("migrate_set_capability", "NAME on|off", "Switches a capability."),
    human("migrate", "[-d] [-r] URI", "Starts a migration; `-r` continues a paused postcopy."),
    human("migrate_incoming", "URI", "Waits for a guest."),
    human("migrate_recover", "URI", "Waits for the source of a paused postcopy."),
    human("migrate_cancel", "", "Cancels the migration."),
    human("migrate_continue", "pre-switchover", "Continues a migration that `pause-before-switchover` has paused."),
    human("migrate_start_postcopy", "", "Starts postcopy."),
    human("migrate_pause", "", "Closes the connections of a postcopy."),
    human("object_add", "TYPE,id=ID[,PROPERTY=VALUE…]", "Adds an object; a comma in a value is doubled."),
    human("object_del", "ID", "Deletes an object."),
    human("stop", "", "Stops the guest; also `s`."),
    human("cont", "", "Starts the guest; also `c`."),
    human("quit", "", "Ends the VM; also `q`."),
];

const fn human(name: &'static str, arguments: &'static str, about: &'static str) -> HumanCommand {
    HumanCommand { name, arguments, about }
}

/// Executes one line and returns its output.
pub(super) fn run(control: &MigrationControl, line: &str, context: &mut Context) -> String {
    match execute(control, line, context) {
        Ok(text) => text,
        Err(error) => format!("Error: {error}\r\n"),
    }
}

fn execute(control: &MigrationControl, line: &str, context: &mut Context) -> Result<String, QmpError> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let nothing = |()| String::new();
    match words.as_slice() {
        [] => Ok(String::new()),
        ["info", "migrate"] => Ok(info::migrate(&control.query(), false)),
        ["info", "migrate", "-a"] => Ok(info::migrate(&control.query(), true)),
        ["info", "migrate_parameters"] => Ok(info::parameters(&control.parameters())),
        ["info", "migrate_capabilities"] => Ok(info::capabilities(&control.capabilities())),
        ["info", "status"] => Ok(info::status(control.run_state())),
        ["info", "dirty_rate"] => Ok(info::dirty_rate(&control.query_dirty_rate(&Map::new())?)),
        ["info", "vcpu_dirty_limit"] => Ok(info::dirty_limits(&control.query_dirty_limits())),
        ["info", ..] => Err(unknown(line)),
        ["set_vcpu_dirty_limit", rate] => limit_dirty_rate(control, Some(rate), None).map(nothing),
        ["set_vcpu_dirty_limit", rate, vcpu] => {
            limit_dirty_rate(control, Some(rate), Some(vcpu)).map(nothing)
        }
        ["cancel_vcpu_dirty_limit"] => limit_dirty_rate(control, None, None).map(nothing),
        ["cancel_vcpu_dirty_limit", vcpu] => limit_dirty_rate(control, None, Some(vcpu)).map(nothing),
        ["calc_dirty_rate", arguments @ ..] => calc_dirty_rate(control, arguments),
        ["migrate_set_parameter", name, value] => set_parameter(control, name, value).map(nothing),
        ["migrate_set_capability", name, state] => {
            let state = parse_switch(state).ok_or_else(|| {
                QmpError::generic(format!("Parameter 'state' expects 'on' or 'off', not '{state}'"))
            })?;
            control.set_capabilities(&[((*name).to_owned(), state)]).map(nothing)
        }
        ["migrate", arguments @ ..] => migrate(control, arguments, context),
        ["migrate_incoming", uri] => {
            let at = address::from_uri(uri)?;
            control.listen_from(at, context).map(nothing)
        }
        ["migrate_recover", uri] => {
            let at = address::from_uri(uri)?;
            control.recover_from(at, context).map(nothing)
        }
        ["object_add", options] => control.add_object(&object(options)?).map(nothing),
        ["object_del", id] => control.delete_object(id).map(nothing),
        ["migrate_start_postcopy"] => control.start_postcopy().map(nothing),
        ["migrate_pause"] => control.pause_postcopy().map(nothing),
        ["migrate_cancel"] => control.cancel(false).map(nothing),
        ["migrate_continue", state] => control.continue_switchover(state).map(nothing),
        ["stop" | "s"] => control.stop().map(nothing),
        ["cont" | "c"] => control.cont().map(nothing),
        ["quit" | "q"] => {
            control.quit_after_reply(context);
            Ok(String::new())
        }
        [name, ..] if HUMAN_COMMANDS.iter().any(|command| command.name == *name) => {
            Ok(format!("{name}: wrong number of arguments\r\n"))
        }
        _ => Err(unknown(line)),
    }
}

fn unknown(line: &str) -> QmpError {
    // The client's text is shortened and freed from control characters before it is returned.
    let shown: String = line.chars().filter(|character| !character.is_control()).take(80).collect();
    let known: Vec<&str> = HUMAN_COMMANDS.iter().map(|command| command.name).collect();
    QmpError::generic(format!("unknown command: '{shown}'; known: {}", known.join(", ")))
}

fn migrate(
    control: &MigrationControl,
    arguments: &[&str],
    context: &mut Context,
) -> Result<String, QmpError> {
    let (mut detached, mut resumes) = (false, false);
    let mut uri = None;
    for argument in arguments {
        match *argument {
            "-d" => detached = true,
            "-r" => resumes = true,
            "-dr" | "-rd" => (detached, resumes) = (true, true),
            option if option.starts_with('-') => {
                return Err(QmpError::generic(format!("migrate has no option '{option}'")));
            }
            _ if uri.is_some() => return Err(QmpError::generic("migrate takes one URI")),
            other => uri = Some(other),
        }
    }
    let uri = uri.ok_or_else(|| QmpError::generic("migrate needs a URI: migrate -d tcp:HOST:PORT"))?;
    let to = address::from_uri(uri)?;
    match resumes {
        true => control.resume_from(to, context)?,
        false => control.migrate_from(to, context)?,
    }
    let mut text = String::new();
    if !detached {
        // QEMU prints this if the monitor cannot wait for the migration.
        let _ = write!(text, "terminal does not allow synchronous migration, continuing detached\r\n");
    }
    Ok(text)
}

/// Executes `calc_dirty_rate [-r] [-b] second [sample_pages_per_GB]`.
fn calc_dirty_rate(control: &MigrationControl, arguments: &[&str]) -> Result<String, QmpError> {
    let mut mode = None;
    let mut numbers = Vec::new();
    for argument in arguments {
        match *argument {
            "-r" => mode = Some("dirty-ring"),
            "-b" => mode = Some("dirty-bitmap"),
            number => numbers.push(parse_number(number).ok_or_else(|| {
                QmpError::generic(format!(
                    "'{number}' is not a number: calc_dirty_rate [-r] [-b] second [sample_pages_per_GB]"
                ))
            })?),
        }
    }
    let Some(seconds @ 1..) = numbers.first().copied() else {
        return Ok("Incorrect period length specified!\r\n".into());
    };
    control.calc_dirty_rate(Order::of_seconds(seconds, mode)?)?;
    Ok(format!(
        "Starting dirty rate measurement with period {seconds} seconds\r\n\
         [Please use 'info dirty_rate' to check results]\r\n"
    ))
}

/// Executes `set_vcpu_dirty_limit dirty_rate [cpu_index]` and `cancel_vcpu_dirty_limit [cpu_index]`.
fn limit_dirty_rate(
    control: &MigrationControl,
    rate: Option<&str>,
    vcpu: Option<&str>,
) -> Result<(), QmpError> {
    let mut arguments = Map::new();
    for (name, text) in [("dirty-rate", rate), ("cpu-index", vcpu)] {
        if let Some(text) = text {
            let number = parse_number(text)
                .ok_or_else(|| QmpError::expects(name, format!("an integer, not '{text}'")))?;
            arguments.insert(name.to_owned(), number.into());
        }
    }
    control.limit_dirty_rate(&arguments)
}

fn set_parameter(control: &MigrationControl, name: &str, text: &str) -> Result<(), QmpError> {
    let spec = parameter(name).ok_or_else(|| {
        QmpError::generic(format!("'{name}' is not a migration parameter; see info migrate_parameters"))
    })?;
    let mut changes = Map::new();
    changes.insert(name.to_owned(), spec.parse(text, 1 << 20)?);
    control.set_parameters(&changes)
}

/// Parses `TYPE,id=ID,PROPERTY=VALUE,…`. A comma in a value is doubled.
fn object(options: &str) -> Result<Map<String, Value>, QmpError> {
    const COMMA: &str = "\0";
    let options = options.replace(",,", COMMA);
    let mut arguments = Map::new();
    for (index, part) in options.split(',').enumerate() {
        let (name, value) = match part.split_once('=') {
            Some((name, value)) => (name, value.replace(COMMA, ",")),
            None if index == 0 => ("qom-type", part.to_owned()),
            None => return Err(QmpError::generic(format!("'{part}' is not an option: write NAME=VALUE"))),
        };
        let value = match (name, parse_switch(&value)) {
            ("verify-peer" | "sanity-check", Some(flag)) => flag.into(),
            _ => value.into(),
        };
        arguments.insert(name.to_owned(), value);
    }
    declared("object-add").map_or(Ok(()), |command| command.check(&arguments))?;
    Ok(arguments)
}
