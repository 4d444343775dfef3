//! The subcommands. Each has a file with its arguments and its execution.

pub mod bench;
pub mod cancel;
pub mod convert;
pub mod decide;
pub mod demo;
pub mod diff;
pub mod extract;
pub mod fork;
pub mod info;
pub mod inspect;
pub mod layers;
pub mod migrate;
pub mod peer;
pub mod plan;
pub mod protect;
pub mod rdma;
pub mod recover;
pub mod relay;
pub mod repair;
pub mod report;
pub mod restore;
pub mod run;
pub mod save;
pub mod serve;
pub mod snapshot;
pub mod standby;
pub mod store;
pub mod takeover;
pub mod unprotect;
pub mod upgrade;
pub mod verify;

/// A capability from the command line and whether it is switched on.
type CapabilityState = (String, bool);

/// Parses `NAME`, `NAME=on` or `NAME=off`.
fn capability(text: &str) -> Result<CapabilityState, String> {
    let (name, state) = text.split_once('=').unwrap_or((text, "on"));
    match state {
        "on" | "off" if !name.is_empty() => Ok((name.to_owned(), state == "on")),
        _ => Err(format!("`{text}` is not NAME, NAME=on or NAME=off")),
    }
}

/// Parses `NAME=VALUE`; both parts must not be empty.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.into(), value.into())),
        _ => Err(format!("`{text}` is not NAME=VALUE")),
    }
}
