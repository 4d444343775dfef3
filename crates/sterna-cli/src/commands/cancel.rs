//! `sterna cancel`: cancels a migration, so that the guest continues to run at the source.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_drive::MonitorAddress;
use sterna_qmp::Endpoint;

use super::migrate::wait_until_over;
use crate::exit::{Done, Status, Stop};
use crate::libvirt;
use crate::monitor::{Monitor, Progress, SECOND_MONITOR};
use crate::terminal;
use crate::units;

/// How long the command waits for the migration to end.
const END_LIMIT: Duration = Duration::from_secs(60);

/// What to cancel.
#[derive(Debug, clap::Args)]
#[command(after_help = SECOND_MONITOR)]
pub struct Arguments {
    /// QMP socket of the VM: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: MonitorAddress,

    /// QMP socket of the destination, which then stops waiting. Needed if the connection was lost
    /// (x-sterna-reconnect-window): otherwise the destination does not learn of the cancellation, and refuses other
    /// migrations until the window ends
    #[arg(long, value_name = "SOCKET", conflicts_with = "force")]
    pub dest_qmp: Option<Endpoint>,

    /// If the VM is a destination that holds a stopped guest: discard this guest. It may be the only copy. Use this
    /// option only if the guest runs at the source or is no longer needed
    #[arg(long)]
    pub force: bool,

    /// Do not wait until the migration has ended: exit with status 0 as soon as the VM has accepted the command
    #[arg(long, conflicts_with = "dest_qmp")]
    pub no_wait: bool,
}

/// Cancels the migration, first at the source, then at the destination if its monitor is known.
pub fn execute(arguments: &Arguments) -> Done {
    if let Some(domain) = arguments.socket.domain() {
        return Err(libvirt::cancel(domain));
    }
    let mut monitor = Monitor::connect(&arguments.socket)?;
    let mut destination = arguments.dest_qmp.as_ref().map(Monitor::connect).transpose()?;
    let query = monitor.execute("query-migrate", Value::Null)?;
    let progress = Progress::from_query(&query);
    // Without a migration, a monitor ignores `migrate_cancel` and reports no error. A destination that holds
    // its guest does react.
    let is_held = query["x-sterna-held"] == true;
    if progress.is_over() && !is_held {
        return Err(Stop::failed(format!(
            "{} has no running migration (status `{}`)",
            monitor.endpoint(),
            progress.status
        )));
    }
    if arguments.force && !monitor.is_sterna() {
        return Err(Stop::usage(
            "--force is only for a Sterna VM that is a destination; a QEMU does not hold a guest",
        ));
    }
    let order = if arguments.force { json!({"x-sterna-force": true}) } else { Value::Null };
    monitor.execute("migrate_cancel", order)?;
    if is_held {
        terminal::note("cancelled; the guest at this VM is discarded");
        return Ok(Status::Done);
    }
    if arguments.no_wait {
        terminal::note("cancelling; `sterna info` shows the result");
        return Ok(Status::Done);
    }
    let had_guest = monitor.run_state()? != "inmigrate";
    let end = wait_until_over(&mut monitor, END_LIMIT);
    let ended = outcome(&mut monitor, end, had_guest)?;
    match destination.as_mut() {
        Some(destination) => cancel_there(destination)?,
        None => {
            if let Some(text) =
                progress.reconnect.and_then(|reconnect| reconnect.remaining_ms).map(does_not_know)
            {
                terminal::note(&text);
            }
        }
    }
    terminal::note(&ended);
    Ok(Status::Done)
}

/// The message about a migration that has ended after the cancellation.
fn outcome(monitor: &mut Monitor, end: Option<Progress>, had_guest: bool) -> Result<String, Stop> {
    let at = monitor.endpoint().clone();
    let Some(end) = end else {
        return Err(Stop::failed(format!(
            "the connection to {at} was lost after the migration was cancelled: `sterna info {at}` shows the result"
        )));
    };
    match end.status.as_str() {
        "completed" => Err(Stop::failed(
            "the migration had completed before it could be cancelled: the guest is at the destination",
        )),
        _ if end.is_over() && had_guest => {
            Ok(format!("cancelled; {}", monitor.where_guest_is("at the source")))
        }
        _ if end.is_over() => Ok("cancelled; this VM does not wait for a guest any more".to_owned()),
        "undecided" | "postcopy-paused" => Err(Stop::with(
            Status::Undecided,
            format!(
                "{at} cannot cancel any more (status `{}`): `sterna info {at}` shows what to do",
                end.status
            ),
        )),
        status => Err(Stop::failed(format!(
            "the migration has not ended within {} (status `{status}`): `sterna info {at}` shows its state",
            units::time(END_LIMIT)
        ))),
    }
}

/// Cancels the migration at a destination that still waits for its source.
fn cancel_there(destination: &mut Monitor) -> Result<(), Stop> {
    // The destination may have noticed the end by itself.
    let waits =
        wait_until_over(destination, Duration::from_secs(1)).is_some_and(|progress| !progress.is_over());
    if waits && destination.is_sterna() {
        destination.execute("migrate_cancel", Value::Null)?;
        wait_until_over(destination, END_LIMIT);
    }
    Ok(())
}

/// The warning about a destination that does not learn of the cancellation because its connection is lost.
fn does_not_know(remaining_ms: u64) -> String {
    format!(
        "the connection is lost, so the destination does not learn of the cancellation, and refuses other migrations \
         for up to {} s: end that with `sterna cancel DESTINATION`, where DESTINATION is the destination's QMP socket",
        remaining_ms.div_ceil(1000)
    )
}
