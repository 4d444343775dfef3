//! The commands, one file each: its arguments, and what it does with them.

pub mod bench;
pub mod cancel;
pub mod convert;
pub mod decide;
pub mod demo;
pub mod diff;
pub mod extract;
pub mod info;
pub mod inspect;
pub mod migrate;
pub mod peer;
pub mod plan;
pub mod protect;
pub mod rdma;
pub mod recover;
pub mod repair;
pub mod report;
pub mod restore;
pub mod run;
pub mod save;
pub mod serve;
pub mod standby;
pub mod takeover;
pub mod unprotect;
pub mod upgrade;
pub mod verify;

/// `NAME=VALUE`.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.into(), value.into())),
        _ => Err(format!("`{text}` is not NAME=VALUE")),
    }
}
