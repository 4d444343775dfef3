//! The command line: its subcommands, the dispatch to them, and parsers that several of them share.

use clap::{Parser, Subcommand};

use crate::commands::{
    bench, cancel, convert, decide, demo, diff, extract, fork, info, inspect, layers, migrate, plan, protect,
    rdma, recover, relay, repair, report, restore, run, save, serve, snapshot, standby, store, takeover,
    unprotect, upgrade, verify,
};
use crate::exit;
use crate::storage::Storage;

/// Migrate, save and restore running virtual machines, in QEMU's formats.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, after_help = exit::HELP, max_term_width = 110)]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands, one file each in [`crate::commands`].
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start two VMs, migrate a guest that writes its memory from one to the other, and check every page
    Demo(demo::Arguments),
    /// Start a VM with a new guest, or (with `--incoming`) a VM that waits for a migrated guest
    Run(Box<run::Arguments>),
    /// Migrate a running guest, show the progress, and report the result
    Migrate(migrate::Arguments),
    /// Move a guest to a new process on this host (for example a new version of Sterna) without copying its memory
    Upgrade(upgrade::Arguments),
    /// Forecast a migration, from given rates or for a running VM, and propose settings if it would not converge
    Plan(plan::Arguments),
    /// Show the state of a VM, of its migration and of its protection
    Info(info::Arguments),
    /// Cancel a migration; the guest continues to run at the source
    Cancel(cancel::Arguments),
    /// Decide which side has the guest: after a migration whose acknowledgement was lost, or as the arbiter of a
    /// protection
    Decide(decide::Arguments),
    /// Resume a postcopy migration over a new connection after its connection broke
    Recover(recover::Arguments),
    /// Check an image: structure, bitmaps, every byte of data; report each error and its position
    Verify(verify::Arguments),
    /// Show an image's contents: blocks, pages, devices; draw its RAM
    Inspect(inspect::Arguments),
    /// Convert an image to another format: mapped-ram, legacy, compressed, with or without libvirt's container
    Convert(convert::Arguments),
    /// Save a guest into an image
    Save(save::Arguments),
    /// Save a running guest into a store again and again, each time only what has changed
    Snapshot(snapshot::Arguments),
    /// Copy a running guest into a second VM, which this command starts
    Fork(fork::Arguments),
    /// Run a standby: store the checkpoints of a guest that runs on another host, and take over if that host fails
    Standby(Box<standby::Arguments>),
    /// Make a standby take over: it starts the guest from the last checkpoint
    Takeover(takeover::Arguments),
    /// Protect a running guest: send checkpoints to a standby that can take over
    Protect(Box<protect::Arguments>),
    /// End the protection of a guest; the guest continues to run where it is
    Unprotect(unprotect::Arguments),
    /// Restore a guest from an image into a waiting VM, or into a VM that this command starts
    Restore(restore::Arguments),
    /// Serve an image to waiting QEMUs or Firecrackers: their guests start immediately and get their memory when they
    /// need it
    Serve(serve::Arguments),
    /// Relay migrations of other VMMs to a relay on another host, over connections that may break
    Relay(Box<relay::Arguments>),
    /// Extract a guest's memory from an image: a block, a range of addresses, or a core file for gdb and crash
    Extract(extract::Arguments),
    /// Compare two images: pages, devices by their fields, configuration
    Diff(diff::Arguments),
    /// Write an image in Sterna's own format as a layer over another base
    Rebase(layers::Rebase),
    /// Write a layer with all pages of its bases, so that it needs no other image
    Flatten(layers::Flatten),
    /// List, remove, check the images of a store, and collect its garbage
    Store(store::Arguments),
    /// Repair a background snapshot whose bitmaps QEMU never wrote
    Repair(repair::Arguments),
    /// Measure what a migration costs on this machine
    Bench(bench::Arguments),
    /// Show whether this host can use RDMA, and what is missing; or check whether a host can be reached over RDMA
    Rdma(rdma::Arguments),
    /// Make an HTML page with a timeline from the record of a migration or a protection
    Report(report::Arguments),
}

impl Command {
    /// Executes the subcommand and returns its exit status.
    pub fn execute(&self) -> exit::Done {
        self.storage().map_or(Ok(()), Storage::install)?;
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
            Self::Snapshot(arguments) => snapshot::execute(arguments),
            Self::Fork(arguments) => fork::execute(arguments),
            Self::Standby(arguments) => standby::execute(arguments),
            Self::Protect(arguments) => protect::execute(arguments),
            Self::Unprotect(arguments) => unprotect::execute(arguments),
            Self::Takeover(arguments) => takeover::execute(arguments),
            Self::Restore(arguments) => restore::execute(arguments),
            Self::Serve(arguments) => serve::execute(arguments),
            Self::Relay(arguments) => relay::execute(arguments),
            Self::Extract(arguments) => extract::execute(arguments),
            Self::Diff(arguments) => diff::execute(arguments),
            Self::Rebase(arguments) => layers::rebase(arguments),
            Self::Flatten(arguments) => layers::flatten(arguments),
            Self::Store(arguments) => store::execute(arguments),
            Self::Repair(arguments) => repair::execute(arguments),
            Self::Bench(arguments) => bench::execute(arguments),
            Self::Rdma(arguments) => rdma::execute(arguments),
            Self::Report(arguments) => report::execute(arguments),
        }
    }
}

impl Command {
    /// How object storages are reached. None if the command takes no image in Sterna's own format.
    fn storage(&self) -> Option<&Storage> {
        match self {
            Self::Run(arguments) => Some(&arguments.restore.storage),
            Self::Verify(arguments) => Some(&arguments.storage),
            Self::Inspect(arguments) => Some(&arguments.storage),
            Self::Convert(arguments) => Some(&arguments.storage),
            Self::Save(arguments) => Some(&arguments.storage),
            Self::Snapshot(arguments) => Some(&arguments.storage),
            Self::Restore(arguments) => Some(&arguments.storage),
            Self::Serve(arguments) => Some(&arguments.storage),
            Self::Extract(arguments) => Some(&arguments.storage),
            Self::Diff(arguments) => Some(&arguments.storage),
            Self::Rebase(arguments) => Some(&arguments.to.storage),
            Self::Flatten(arguments) => Some(&arguments.to.storage),
            Self::Store(arguments) => Some(arguments.storage()),
            _ => None,
        }
    }

    /// The exit status if standard output cannot be written.
    /// None if the command has another result, such as a migrated guest or a file.
    pub fn status_without_output(&self) -> Option<exit::Status> {
        match self {
            // For these commands, 1 means that the images are damaged or differ.
            Self::Verify(_) | Self::Diff(_) => Some(exit::Status::Unreadable),
            Self::Plan(_)
            | Self::Info(_)
            | Self::Inspect(_)
            | Self::Bench(_)
            | Self::Rdma(_)
            | Self::Demo(_) => Some(exit::Status::Failed),
            _ => None,
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
    fn help_begins_with_what_the_command_does() {
        let help = Cli::command().render_help().to_string();

        assert!(help.starts_with("Migrate, save and restore"), "{help}");
    }

    #[test]
    fn options_of_another_direction_are_not_shown() {
        let save = Cli::command().find_subcommand_mut("save").unwrap().render_long_help().to_string();

        assert!(
            save.contains("--tls-dir") && !save.contains("--uuid") && !save.contains("--tls-hostname"),
            "{save}"
        );
    }

    #[test]
    fn migrate_takes_settings_as_pairs() {
        let line = ["sterna", "migrate", "/s", "tcp:h:1", "--set", "max-bandwidth=1G", "--cap", "multifd"];

        let Command::Migrate(arguments) = Cli::try_parse_from(line).unwrap().command else { panic!() };

        assert_eq!(arguments.set, [("max-bandwidth".to_owned(), "1G".to_owned())]);
        assert_eq!(arguments.cap, [("multifd".to_owned(), true)]);
        assert!(Cli::try_parse_from(["sterna", "migrate", "/s", "tcp:h:1", "--set", "novalue"]).is_err());
    }

    #[test]
    fn capabilities_are_switched_on_or_off() {
        let caps = |caps: &[&str]| {
            let line = ["sterna", "migrate", "/s", "tcp:h:1"].into_iter();
            Cli::try_parse_from(line.chain(caps.iter().flat_map(|cap| ["--cap", cap])))
        };
        let Ok(Cli { command: Command::Migrate(arguments), .. }) =
            caps(&["xbzrle=off", "multifd=on", "events"])
        else {
            panic!()
        };

        let wanted = [("xbzrle", false), ("multifd", true), ("events", true)];
        assert_eq!(arguments.cap, wanted.map(|(name, is_on)| (name.to_owned(), is_on)));
        for wrong in ["multifd=yes", "=on", "multifd="] {
            assert!(caps(&[wrong]).is_err(), "{wrong}");
        }
    }
}
