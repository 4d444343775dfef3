//! `sterna cancel`: ends a migration; the guest runs on at the source.

use serde_json::Value;
use sterna_qmp::Endpoint;

use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// What to cancel.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the VM: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
}

/// Cancels.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    let progress = monitor.progress()?;
    // QEMU does nothing then, and does not say so.
    if !monitor.is_sterna() && progress.is_over() {
        return Err(Stop::failed(format!(
            "{} has no migration under way (status `{}`)",
            monitor.endpoint(),
            progress.status
        )));
    }
    monitor.execute("migrate_cancel", Value::Null)?;
    terminal::note("cancelling; the guest runs on at the source");
    Ok(Status::Done)
}
