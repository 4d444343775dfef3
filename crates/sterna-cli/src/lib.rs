//! The `sterna` command: start VMs, migrate them, look at them, see what came of it.
//!
//! Commands stand in [`commands`], one file each. They work over QMP, so that they drive QEMU as they drive
//! Sterna's own VMs, and what they print exists as JSON too ([`record`]).
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

pub mod bench;
pub mod children;
pub mod cli;
pub mod commands;
pub mod exit;
pub mod figures;
pub mod host;
pub mod interrupts;
pub mod monitor;
pub mod plan;
pub mod record;
pub mod report;
mod seconds;
pub mod serial;
pub mod summary;
pub mod terminal;
mod tls;
pub mod units;
pub mod watch;

#[cfg(test)]
mod samples;

/// Parses the command line, does it, and says in one sentence why it ended early, if it did.
pub fn main() -> ExitCode {
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
