//! The command line.

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, cancel, convert, decide, demo, diff, extract, info, inspect, migrate, plan, repair, report,
    restore, run, save, verify,
};
use crate::exit;

/// Moves running virtual machines, on QEMU's wire format.
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
    /// Start two VMs, migrate one to the other while it writes its memory, and check what arrived
    Demo(demo::Arguments),
    /// Start a VM with a QMP socket, or one that waits for a guest
    Run(run::Arguments),
    /// Migrate a running guest, watch it, and see what came of it
    Migrate(migrate::Arguments),
    /// Say how a migration would go, from figures or for a running VM, and what to change if it would not end
    Plan(plan::Arguments),
    /// Show what a VM is doing and how its migration stands
    Info(info::Arguments),
    /// Cancel a migration; the guest runs on at the source
    Cancel(cancel::Arguments),
    /// Say where the guest is when a migration's end was lost in the network
    Decide(decide::Arguments),
    /// Check an image: structure, bitmaps, every byte of data; say what is damaged where
    Verify(verify::Arguments),
    /// Show what an image is: blocks, pages, devices; draw its RAM
    Inspect(inspect::Arguments),
    /// Turn an image into another form: mapped-ram, legacy, packed, in libvirt's container or out of it
    Convert(convert::Arguments),
    /// Save a guest into an image
    Save(save::Arguments),
    /// Restore a guest from an image into a VM that waits for one, or that is started for it
    Restore(restore::Arguments),
    /// Take a guest's memory out of an image: a block, a range of addresses, or a core file for gdb and crash
    Extract(extract::Arguments),
    /// Compare two images: pages, devices by their fields, configuration
    Diff(diff::Arguments),
    /// Mend a background snapshot whose bitmaps QEMU never wrote
    Repair(repair::Arguments),
    /// Measure what a migration costs on this machine
    Bench(bench::Arguments),
    /// Turn a migration's record into an HTML page with its timeline
    Report(report::Arguments),
}

impl Command {
    /// Does it.
    pub fn execute(&self) -> exit::Done {
        match self {
            Self::Demo(arguments) => demo::execute(arguments),
            Self::Run(arguments) => run::execute(arguments),
            Self::Migrate(arguments) => migrate::execute(arguments),
            Self::Plan(arguments) => plan::execute(arguments),
            Self::Info(arguments) => info::execute(arguments),
            Self::Cancel(arguments) => cancel::execute(arguments),
            Self::Decide(arguments) => decide::execute(arguments),
            Self::Verify(arguments) => verify::execute(arguments),
            Self::Inspect(arguments) => inspect::execute(arguments),
            Self::Convert(arguments) => convert::execute(arguments),
            Self::Save(arguments) => save::execute(arguments),
            Self::Restore(arguments) => restore::execute(arguments),
            Self::Extract(arguments) => extract::execute(arguments),
            Self::Diff(arguments) => diff::execute(arguments),
            Self::Repair(arguments) => repair::execute(arguments),
            Self::Bench(arguments) => bench::execute(arguments),
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
