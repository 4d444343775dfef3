//! The `sterna` command: start, migrate, save and inspect VMs.
//!
//! Commands are in [`commands`], one file each. They work over QMP, so they drive QEMU and Sterna's own VMs alike.
//! What they print is also available as JSON ([`record`]).
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

pub mod bench;
pub mod children;
mod claims;
pub mod cli;
pub mod commands;
pub mod cpio;
pub mod derived;
mod disk;
pub mod exit;
pub mod host;
pub mod interrupts;
mod linux_guest;
pub mod monitor;
mod net;
pub mod plan;
pub mod record;
pub mod report;
mod seconds;
mod secret;
pub mod serial;
pub mod summary;
pub mod terminal;
mod tls;
pub mod units;
mod vhost_user;
pub mod watch;

#[cfg(test)]
mod samples;

/// Parses the command line, does it, and says in one sentence why it ended early, if it did.
pub fn main() -> ExitCode {
    if linux_guest::is_init() {
        linux_guest::run();
    }
    let cli = cli::Cli::parse();
    log();
    match cli.command.execute() {
        Ok(status) => status.into(),
        Err(stop) => {
            terminal::complain(&stop);
            stop.status.into()
        }
    }
}

/// What the engine and the machine log goes to standard error: warnings, or what `STERNA_LOG` asks for
/// (`debug`, `sterna=trace`).
fn log() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .with_env_var("STERNA_LOG")
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
}
