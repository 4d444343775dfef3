//! `sterna fork`: copies a running guest into a second VM.

use std::ffi::OsString;

use serde_json::json;
use sterna_drive::MonitorAddress;
use sterna_drive::fork::{Forked, fork};
use sterna_drive::restore::launch::Launched;

use crate::commands::restore::place;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::terminal::{self, Live, Shown};
use crate::units;
use crate::watch::Watcher;

/// Which guest, and into which VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The guest is paused for milliseconds. The copy begins with its memory and devices of that moment, and has its own process and monitor.

Both guests must not share what only one may have:
  disks    give the copy other files with the same content, made while the guest is paused or by a snapshot of the file system. Sterna
           refuses a disk that the first guest has locked
  network  give the copy another tap. Both have the same MAC and IP addresses: connect them to different networks, or change the
           addresses in the copy before it is connected
  secrets  both have the same keys, seeds of random numbers, host name and open connections

Example: sterna fork a.qmp -- sterna run --ram 1G")]
pub struct Arguments {
    /// QMP socket of the Sterna VM: unix:PATH, a path, or qmp:PATH
    pub source: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
    /// Command line of the second VM, with the same machine: sterna run … This command adds --incoming and --qmp
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Copies the guest, and reports the copy.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let address: MonitorAddress =
        arguments.source.strip_prefix("qmp:").unwrap_or(&arguments.source).parse().map_err(Stop::usage)?;
    let mut monitor = Monitor::connect(&address)?;
    let directory = place::directory()
        .map_err(|error| Stop::failed(format!("cannot create a directory for the VM's monitor: {error}")))?;
    let live = Live::new(arguments.shown, arguments.json);
    let mut watcher = Watcher::new(&live, &interrupts);
    let mut launched = Launched::start(&arguments.command, directory.path())?;
    let forked = fork(monitor.vm(), &mut launched, directory.path(), &mut watcher)?;
    live.end();
    terminal::print(&if arguments.json { to_json(&forked, &launched) } else { table(&forked, &launched) });
    launched.release();
    let _ = directory.keep();
    Ok(Status::Done)
}

fn table(forked: &Forked, launched: &Launched) -> String {
    let state = if forked.is_running { "runs" } else { "is paused, as the guest was" };
    format!(
        "copy         {state}\n\
         pause        {}\n\
         guest RAM    {}\n\
         total time   {}\n\
         process      {}\n\
         monitor      {}\n\
         messages     {}\n",
        units::seconds(forked.pause.as_secs_f64()),
        units::bytes(forked.ram_bytes),
        units::seconds(forked.total.as_secs_f64()),
        launched.id(),
        launched.socket().display(),
        launched.log().display(),
    )
}

fn to_json(forked: &Forked, launched: &Launched) -> String {
    let value = json!({
        "schema": "sterna-fork",
        "version": 1,
        "is_running": forked.is_running,
        "pause": forked.pause.as_secs_f64(),
        "ram_total_bytes": forked.ram_bytes,
        "total_time": forked.total.as_secs_f64(),
        "process": launched.id(),
        "monitor": launched.socket().display().to_string(),
        "messages": launched.log().display().to_string(),
    });
    format!("{value:#}\n")
}
