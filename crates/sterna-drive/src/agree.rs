//! Compares the settings of both monitors on which the stream depends, before anything is changed.
//!
//! The stream does not contain these settings. If they differ, the migration hangs, fails in the middle, or ends the
//! destination's process (observed: QEMU 11.1.3 with `multifd` at the source only).
//! The error does not name the setting.

use serde_json::Value;

use super::side::{Side, Wanted};
use super::{DriveError, Vm};

/// Capabilities that must be on at both sides or at neither.
const ALIKE: [&str; 3] = ["multifd", "x-ignore-shared", "compress"];
/// Capabilities that the destination must have if the source has them.
const FOLLOW: [&str; 1] = ["postcopy-ram"];
/// Capabilities that a QEMU destination must have if the source has them.
const FOLLOW_QEMU: [&str; 1] = ["switchover-ack"];
/// (capability, condition): the capability must be equal if the source has the condition, another capability.
const ALIKE_WITH: [(&str, &str); 1] = [("postcopy-preempt", "postcopy-ram")];
/// (parameter, capability): the parameter must be equal if the source has the capability.
const EQUAL_WITH: [(&str, &str); 2] = [("multifd-channels", "multifd"), ("multifd-compression", "multifd")];

/// Refuses two VMs whose settings do not match. Includes the settings that the command line will change.
///
/// # Errors
/// [`DriveError::Unfit`] lists every difference and the options that remove it. Nothing was changed.
pub fn compare(source: &mut Vm, destination: &mut Vm, wanted: Wanted<'_>) -> Result<(), DriveError> {
    // The source never listens, so it always gets the wanted settings.
    let source = Side { wanted: Some(wanted), ..Side::ask(source, wanted)? };
    let destination = Side::ask(destination, wanted)?;
    let mut differences = Vec::new();
    let mut options = Vec::new();
    let word = |is_on| if is_on { "on" } else { "off" };
    let mut switch = |name: &str, ours: bool, theirs: bool| {
        let [here, there] = [(&source, ours), (&destination, theirs)]
            .map(|(side, is_on)| format!("{} at {}", word(is_on), side.at));
        differences.push(format!("{name} is {here} and {there}"));
        options.push(format!("--cap {name}"));
    };
    for name in ALIKE {
        if source.has(name) != destination.has(name) {
            switch(name, source.has(name), destination.has(name));
        }
    }
    let of_qemu = FOLLOW_QEMU.iter().filter(|_| !destination.is_sterna);
    for name in FOLLOW.iter().chain(of_qemu) {
        if source.has(name) && !destination.has(name) {
            switch(name, true, false);
        }
    }
    for (name, with) in ALIKE_WITH {
        if source.has(with) && source.has(name) != destination.has(name) {
            switch(name, source.has(name), destination.has(name));
        }
    }
    for (name, with) in EQUAL_WITH {
        let (ours, theirs) = (source.parameter(name), destination.parameter(name));
        if source.has(with)
            && destination.has(with)
            && let (Some(ours), Some(theirs)) = (ours, theirs)
            && ours != theirs
        {
            let (ours, theirs) = (text(ours), text(theirs));
            differences.push(format!("{name} is {ours} at {} and {theirs} at {}", source.at, destination.at));
            options.push(format!("--set {name}={ours}"));
        }
    }
    if source.has_tls() != destination.has_tls() {
        let [here, there] =
            [&source, &destination].map(|side| format!("{} at {}", word(side.has_tls()), side.at));
        differences.push(format!("TLS (tls-creds) is {here} and {there}"));
        options.push("--tls-dir DIR".to_owned());
    }
    if differences.is_empty() {
        return Ok(());
    }
    let advice = match destination.listens {
        true => format!(
            "{} listens already and gets no settings from this command: set it there before it listens, or start it with \
             `-incoming defer`",
            destination.at
        ),
        false => format!("`{}` sets both sides; or change one side's setting", options.join(" ")),
    };
    Err(DriveError::Unfit(format!(
        "the settings of the two sides differ: {}; {advice}",
        differences.join(", ")
    )))
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
