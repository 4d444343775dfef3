//! The command line.

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, cancel, convert, decide, demo, diff, extract, info, inspect, migrate, plan, protect, rdma,
    recover, repair, report, restore, run, save, serve, standby, takeover, unprotect, upgrade, verify,
};
use crate::exit;

/// Migrate, save and restore running virtual machines, in QEMU's formats.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, about, after_help = exit::HELP, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands, one file each in [`crate::commands`].
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start two VMs, migrate a guest that writes its memory from one to the other, and check every page
    Demo(demo::Arguments),
    /// Start a VM, or a VM that waits for a migration
    Run(Box<run::Arguments>),
    /// Migrate a running guest, show the progress, and report the result
    Migrate(migrate::Arguments),
    /// Let a guest go on in a new process on this host, such as a new version of Sterna, without copying its memory
    Upgrade(upgrade::Arguments),
    /// Forecast a migration, from given rates or for a running VM, and say what to change if it would not converge
    Plan(plan::Arguments),
    /// Show what a VM is doing and the state of its migration
    Info(info::Arguments),
    /// Cancel a migration; the guest runs on at the source
    Cancel(cancel::Arguments),
    /// Decide which side has the guest, after an acknowledgement was lost or where an operator is a protection's arbiter
    Decide(decide::Arguments),
    /// Let a postcopy whose connection broke go on over another connection
    Recover(recover::Arguments),
    /// Check an image: structure, bitmaps, every byte of data; report each damage and its place
    Verify(verify::Arguments),
    /// Show an image's contents: blocks, pages, devices; draw its RAM
    Inspect(inspect::Arguments),
    /// Convert an image to another format: mapped-ram, legacy, compressed, with or without libvirt's container
    Convert(convert::Arguments),
    /// Save a guest into an image
    Save(save::Arguments),
    /// Hold the last checkpoint of a QEMU that runs elsewhere, and take over when that is gone
    Standby(Box<standby::Arguments>),
    /// Let a standby's guest go on there
    Takeover(takeover::Arguments),
    /// Protect the guest of a QEMU 11: a standby holds its last checkpoint from now on
    Protect(Box<protect::Arguments>),
    /// End a protection; the guest runs on where it ran
    Unprotect(unprotect::Arguments),
    /// Restore a guest from an image into a VM that waits for it, or that this command starts
    Restore(restore::Arguments),
    /// Serve an image to QEMUs whose guests run at once and get their memory as they need it
    Serve(serve::Arguments),
    /// Extract a guest's memory from an image: a block, a range of addresses, or a core file for gdb and crash
    Extract(extract::Arguments),
    /// Compare two images: pages, devices by their fields, configuration
    Diff(diff::Arguments),
    /// Repair a background snapshot whose bitmaps QEMU never wrote
    Repair(repair::Arguments),
    /// Measure what a migration costs on this machine
    Bench(bench::Arguments),
    /// Show what this host has for RDMA and what is missing, or check whether another host can be reached over RDMA
    Rdma(rdma::Arguments),
    /// Make an HTML page with a timeline from a migration's record
    Report(report::Arguments),
}

impl Command {
    /// Does it.
    pub fn execute(&self) -> exit::Done {
        match self {
            Self::Demo(arguments) => demo::execute(arguments),
            Self::Run(arguments) => run::execute(arguments),
            Self::Migrate(arguments) => migrate::execute(arguments),
            Self::Upgrade(arguments) => upgrade::execute(arguments),
            Self::Plan(arguments) => plan::execute(arguments),
            Self::Info(arguments) => info::execute(arguments),
            Self::Cancel(arguments) => cancel::execute(arguments),
            Self::Decide(arguments) => decide::execute(arguments),
            Self::Recover(arguments) => recover::execute(arguments),
            Self::Verify(arguments) => verify::execute(arguments),
            Self::Inspect(arguments) => inspect::execute(arguments),
            Self::Convert(arguments) => convert::execute(arguments),
            Self::Save(arguments) => save::execute(arguments),
            Self::Standby(arguments) => standby::execute(arguments),
            Self::Protect(arguments) => protect::execute(arguments),
            Self::Unprotect(arguments) => unprotect::execute(arguments),
            Self::Takeover(arguments) => takeover::execute(arguments),
            Self::Restore(arguments) => restore::execute(arguments),
            Self::Serve(arguments) => serve::execute(arguments),
            Self::Extract(arguments) => extract::execute(arguments),
            Self::Diff(arguments) => diff::execute(arguments),
            Self::Repair(arguments) => repair::execute(arguments),
            Self::Bench(arguments) => bench::execute(arguments),
            Self::Rdma(arguments) => rdma::execute(arguments),
            Self::Report(arguments) => report::execute(arguments),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn migrate_takes_settings_as_pairs() {
        let line = ["sterna", "migrate", "/s", "tcp:h:1", "--set", "max-bandwidth=1G", "--cap", "multifd"];

        let Command::Migrate(arguments) = Cli::try_parse_from(line).unwrap().command else { panic!() };

        assert_eq!(arguments.set, [("max-bandwidth".to_owned(), "1G".to_owned())]);
        assert!(Cli::try_parse_from(["sterna", "migrate", "/s", "tcp:h:1", "--set", "novalue"]).is_err());
    }
}
