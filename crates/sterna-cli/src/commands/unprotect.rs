//! `sterna unprotect`: ends a protection; the guest continues to run at its primary.

use std::time::Duration;

use serde_json::Value;
use sterna_drive::Vm;
use sterna_drive::protect::LeftProtection;
use sterna_qmp::Endpoint;

use super::protect::own;
use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// Slightly longer than the time for which `sterna protect` itself waits for the end.
const LIMIT: Duration = Duration::from_secs(120);

/// Which protection.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Socket of `sterna protect --qmp`, or QMP socket of a Sterna VM: unix:PATH, a path, or tcp:HOST:PORT. If `sterna
    /// protect` of a QEMU was killed: the QMP socket of that QEMU. This command then removes everything that `sterna
    /// protect` left in it
    pub socket: Endpoint,
    /// For a QEMU: declare that the standby does not run the guest and never will. The guest may then run here
    #[arg(long)]
    pub vouch: bool,
}

/// Ends the protection, or removes what an interrupted one has left.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    if !monitor.is_sterna() {
        return left_in(&arguments.socket, monitor.vm(), arguments.vouch);
    }
    monitor.set_limit(Some(LIMIT));
    let end = monitor.execute("x-sterna-unprotect", Value::Null)?;
    if end["runs_here"].is_null() {
        return own::unprotect(&mut monitor);
    }
    if end["runs_here"] != true {
        return Err(Stop::with(Status::Lost, "the standby has the guest; the primary has ended its copy"));
    }
    for left in end["left"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        terminal::note(&format!("sterna: warning: {left}"));
    }
    terminal::note("the guest is not protected any more and continues to run at the primary");
    Ok(Status::Done)
}

/// Removes the objects of a protection from a QEMU whose `sterna protect` was killed or interrupted.
fn left_in(socket: &Endpoint, vm: &mut Vm, vouch: bool) -> Done {
    let found = LeftProtection::look(vm)?;
    if found.is_empty() {
        terminal::note(&format!("{socket} has no protection and no remains of one: nothing was changed"));
        return Ok(Status::Done);
    }
    if found.is_in_use {
        return Err(Stop::failed(format!(
            "a `sterna protect` protects the guest of {socket}: end that command with Ctrl-C, or give the socket of \
             its --qmp"
        )));
    }
    if !vouch {
        return Err(Stop::failed(format!(
            "{socket} has {}. The standby may run the guest, or may still take it over: make sure that it does not \
             and never will (`sterna info` at the standby; stop it there), then add --vouch",
            described(&found)
        )));
    }
    let removed = LeftProtection::remove(vm);
    for left in &removed.left {
        terminal::note(&format!("sterna: warning: {left}"));
    }
    if !removed.runs_here {
        return Err(Stop::failed(format!(
            "the guest of {socket} does not run; the remains of the protection were removed as far as possible"
        )));
    }
    let settings = match removed.are_settings_off {
        true => {
            "The settings before the protection are not known: x-colo, return-path and multifd are now off, and \
             x-checkpoint-delay has QEMU's default"
        }
        false => "The settings of the protection are still on, because QEMU refuses to change them",
    };
    terminal::note(&format!(
        "the remains of the protection are removed, and the guest continues to run, unprotected. {settings}"
    ));
    Ok(Status::Done)
}

/// The objects that a protection has left in a QEMU, as text.
pub(super) fn described(found: &LeftProtection) -> String {
    let count = |names: &[String], what: &str| {
        (!names.is_empty()).then(|| format!("{} {what} ({})", names.len(), names.join(", ")))
    };
    let parts = [
        count(&found.filters, "filters that delay the guest's packets"),
        count(&found.chardevs, "character devices of gates"),
        count(&found.nodes, "block nodes that lead to a standby"),
        found.has_colo.then(|| "the capability x-colo on".to_owned()),
        Some(format!("a guest that is `{}` and a migration that is `{}`", found.guest, found.migration)),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
