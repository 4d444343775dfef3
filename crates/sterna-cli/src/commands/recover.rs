//! `sterna recover`: a postcopy whose connection broke goes on over another one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::Endpoint;

use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// How often the status is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Which migration, and where its destination is.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source, whose status is postcopy-paused
    pub socket: Endpoint,
    /// Address of the destination: tcp:HOST:PORT or unix:PATH
    pub uri: String,
    /// QMP socket of the destination: it listens anew at the address. Without it the destination must be reachable there already
    #[arg(long, value_name = "SOCKET")]
    pub dest_qmp: Option<Endpoint>,
    /// How long to wait for both sides to be paused, and for the pages to go on, in seconds
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub patience: u64,
}

/// Recovers.
pub fn execute(arguments: &Arguments) -> Done {
    let patience = Duration::from_secs(arguments.patience);
    let mut source = Monitor::connect(&arguments.socket)?;
    if let Some(socket) = &arguments.dest_qmp {
        let mut destination = Monitor::connect(socket)?;
        wait(&mut destination, patience, &["postcopy-paused"])?;
        destination.execute("migrate-recover", json!({ "uri": arguments.uri }))?;
    }
    wait(&mut source, patience, &["postcopy-paused"])?;
    source.execute("migrate", json!({ "uri": arguments.uri, "resume": true }))?;
    let status = wait(&mut source, patience, &["postcopy-active", "completed", "postcopy-paused"])?;
    if status == "postcopy-paused" {
        let why = source.execute("query-migrate", Value::Null)?;
        let why = why["error-desc"].as_str().unwrap_or("no reason was given").to_owned();
        let text = format!(
            "it is paused as before, and nothing is lost: {why}. Recover it again when that is mended."
        );
        return Err(Stop::with(Status::Undecided, text));
    }
    terminal::note("the guest's pages go on to the destination; `sterna info` shows how far they are");
    Ok(Status::Done)
}

/// Waits until the monitor's migration has one of these statuses.
fn wait(monitor: &mut Monitor, patience: Duration, wanted: &[&str]) -> Result<String, Stop> {
    let until = Instant::now() + patience;
    loop {
        let status =
            monitor.execute("query-migrate", Value::Null)?["status"].as_str().unwrap_or("none").to_owned();
        if wanted.contains(&status.as_str()) {
            return Ok(status);
        }
        if Instant::now() >= until {
            return Err(Stop::failed(format!(
                "{}: its migration is {status}, and not {}: only a postcopy whose connection broke can be recovered",
                monitor.endpoint(),
                wanted.join(" or ")
            )));
        }
        std::thread::sleep(LOOK);
    }
}
