//! The `sterna` command: start, migrate, save and inspect VMs.
//!
//! Commands are in [`commands`], one file each. They work over QMP, so they control QEMU and Sterna VMs in
//! the same way.
//! What they print is also available as JSON ([`record`]).
#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub mod bench;
mod bitmaps;
mod board;
pub mod children;
mod claims;
pub mod cli;
pub mod commands;
mod course;
pub mod cpio;
pub mod derived;
mod disk;
pub mod exit;
mod frames;
pub mod host;
pub mod interrupts;
mod libvirt;
mod limits;
mod linux_guest;
pub mod metrics;
pub mod monitor;
mod net;
pub mod plan;
pub mod protection_record;
pub mod record;
pub mod relay_record;
pub mod report;
mod seconds;
mod secret;
pub mod serial;
mod service;
pub mod storage;
pub mod summary;
pub mod terminal;
mod tls;
pub mod units;
mod vhost_user;
pub mod watch;
mod watchdog;

#[cfg(test)]
mod samples;

/// Executes the command line. If the command ends early, prints the reason in one sentence.
pub fn main() -> ExitCode {
    if linux_guest::is_init() {
        linux_guest::run();
    }
    let cli = cli::Cli::parse();
    let is_log = !std::io::stderr().is_terminal();
    log(default_level(&cli.command, is_log), logged_besides(&cli.command));
    if !matches!(cli.command, cli::Command::Run(_)) {
        limits::clean_up_on_abort();
    }
    match limits::prepare().and_then(|()| cli.command.execute()) {
        Ok(status) => with_output(&cli.command, status).into(),
        Err(stop) => {
            terminal::complain(&stop);
            stop.status.into()
        }
    }
}

/// The exit status, with errors of standard output taken into account.
/// They matter only if the printed text is the command's result. If the result is a guest's place or a file,
/// `status` stays.
fn with_output(command: &cli::Command, status: exit::Status) -> exit::Status {
    let Some(error) = terminal::output_error() else { return status };
    let why = format!("cannot write to standard output: {error}");
    match command.status_without_output() {
        Some(without) => {
            terminal::complain(&exit::Stop::with(without, why));
            without
        }
        None => {
            terminal::note(&format!("sterna: warning: {why}; the command itself has succeeded"));
            status
        }
    }
}

/// The log level without `STERNA_LOG`: failures that no command reports.
/// A VM whose standard error is no terminal (`is_log`) logs warnings, too. Commands report the result of
/// their work in a sentence of their own.
fn default_level(command: &cli::Command, is_log: bool) -> LevelFilter {
    match command {
        cli::Command::Run(_) if is_log => LevelFilter::WARN,
        _ => LevelFilter::ERROR,
    }
}

/// Directives that apply to commands that wait for a peer: they log why a connection was refused.
/// The peer does not learn the reason and its error refers to this log, while the command continues to wait.
fn logged_besides(command: &cli::Command) -> &'static str {
    let waits = match command {
        cli::Command::Save(save) => save.source.starts_with("listen:"),
        cli::Command::Standby(_) => true,
        _ => false,
    };
    if waits { "sterna::incoming::accept=warn" } else { "" }
}

/// Writes the log of the engine and the machine to standard error.
/// `STERNA_LOG` sets the levels (`warn`, `debug`, `sterna=trace`).
/// Without `STERNA_LOG`, the directives `more` apply in addition to `default`.
fn log(default: LevelFilter, more: &str) {
    let directives = std::env::var("STERNA_LOG");
    let targets = targets(directives.as_deref().unwrap_or(more), default);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).without_time();
    tracing_subscriber::registry().with(layer.with_filter(targets)).init();
}

/// Levels by target. Directives that cannot be parsed are ignored; `default` holds where no directive names a target.
fn targets(directives: &str, default: LevelFilter) -> Targets {
    let parsed = directives.split(',').filter_map(|directive| directive.trim().parse::<Targets>().ok());
    parsed.fold(Targets::new().with_default(default), |targets, parsed| {
        let level = parsed.default_level();
        let targets = targets.with_targets(parsed);
        match level {
            Some(level) => targets.with_default(level),
            None => targets,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_of_the_log_set_levels_and_wrong_ones_are_ignored() {
        let would_log = |directives: &str, target: &str, level: LevelFilter| {
            targets(directives, LevelFilter::ERROR)
                .would_enable(target, &level.into_level().expect("not off"))
        };

        assert!(would_log("", "sterna", LevelFilter::ERROR) && !would_log("", "sterna", LevelFilter::WARN));
        assert!(would_log("debug", "rustls", LevelFilter::DEBUG));
        assert!(would_log("sterna=trace", "sterna::threads", LevelFilter::TRACE));
        assert!(!would_log("sterna=trace", "rustls", LevelFilter::WARN), "the default holds for the rest");
        assert!(would_log("sterna=loud, sterna_qmp=info", "sterna_qmp::server", LevelFilter::INFO));
        assert!(would_log("warn,sterna::pages=off", "sterna", LevelFilter::WARN));
        assert!(!would_log("warn,sterna::pages=off", "sterna::pages", LevelFilter::ERROR));
    }

    #[test]
    fn warnings_of_the_engine_are_logged_by_default_for_vms_without_a_terminal_alone() {
        let level = |line: &[&str], is_log| {
            let cli = cli::Cli::try_parse_from([&["sterna"], line].concat()).unwrap();
            default_level(&cli.command, is_log)
        };

        assert_eq!(level(&["run"], true), LevelFilter::WARN);
        assert_eq!(level(&["run"], false), LevelFilter::ERROR);
        assert_eq!(level(&["migrate", "unix:/a", "tcp:h:1"], true), LevelFilter::ERROR);
        assert_eq!(level(&["save", "listen:tcp:h:1", "image"], true), LevelFilter::ERROR);
    }

    #[test]
    fn refused_connections_are_logged_by_commands_that_wait_for_a_peer() {
        let logs = |line: &[&str]| {
            let cli = cli::Cli::try_parse_from([&["sterna"], line].concat()).unwrap();
            !logged_besides(&cli.command).is_empty()
        };

        assert!(logs(&["save", "listen:tcp:h:1", "image"]));
        assert!(logs(&["standby", "listen:tcp:h:1", "--image", "image"]));
        assert!(!logs(&["save", "/run/vm.qmp", "image"]));
        assert!(!logs(&["migrate", "unix:/a", "tcp:h:1"]));
    }
}
