//! `sterna cancel`: ends a migration; the guest runs on at the source.

use serde_json::{Value, json};
use sterna_qmp::Endpoint;

use crate::exit::{Done, Status, Stop};
use crate::monitor::{Monitor, Progress};
use crate::terminal;

/// What to cancel.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the VM: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,

    /// Discard a guest that this destination holds, which may be the only copy. Use it only when the guest runs at the
    /// source or is no longer needed
    #[arg(long)]
    pub force: bool,
}

/// Cancels.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    let query = monitor.execute("query-migrate", Value::Null)?;
    let progress = Progress::from_query(&query);
    // A monitor does nothing then, and does not say so. A destination that holds its guest waits for a word.
    let is_held = query["x-sterna-held"] == true;
    if progress.is_over() && !is_held {
        return Err(Stop::failed(format!(
            "{} has no running migration (status `{}`)",
            monitor.endpoint(),
            progress.status
        )));
    }
    if arguments.force && !monitor.is_sterna() {
        return Err(Stop::usage("--force is for a Sterna VM that holds a guest; QEMU holds none"));
    }
    let order = if arguments.force { json!({"x-sterna-force": true}) } else { Value::Null };
    monitor.execute("migrate_cancel", order)?;
    terminal::note(what_comes(is_held));
    Ok(Status::Done)
}

/// What a cancel that was taken leads to. A held guest is cancelled by force only.
fn what_comes(is_held: bool) -> &'static str {
    if is_held {
        "cancelling; the guest that this VM held is discarded"
    } else {
        "cancelling; the guest runs on at the source"
    }
}
