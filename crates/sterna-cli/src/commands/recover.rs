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
    let before = why(&source.execute("query-migrate", Value::Null)?);
    source.execute("migrate", json!({ "uri": arguments.uri, "resume": true }))?;
    if let Some(why) = attempt(&mut source, patience, &before)? {
        let text = format!(
            "it is paused as before, and nothing is lost: {why}. Recover it again when that is mended."
        );
        return Err(Stop::with(Status::Undecided, text));
    }
    terminal::note("the guest's pages go on to the destination; `sterna info` shows how far they are");
    Ok(Status::Done)
}

/// Waits until the attempt has succeeded; or gives the reason why it has not.
///
/// The source is paused for a moment longer, with the reason of `before`: it begins when nothing comes of the lost connection any more.
fn attempt(source: &mut Monitor, patience: Duration, before: &str) -> Result<Option<String>, Stop> {
    let until = Instant::now() + patience;
    let mut has_begun = false;
    loop {
        // Status and reason of one moment.
        let info = source.execute("query-migrate", Value::Null)?;
        let is_late = Instant::now() >= until;
        match info["status"].as_str().unwrap_or("none") {
            "postcopy-active" | "completed" => return Ok(None),
            "postcopy-paused" if has_begun || is_late || why(&info) != before => return Ok(Some(why(&info))),
            "postcopy-paused" => {}
            "postcopy-recover" if !is_late => has_begun = true,
            status => {
                let at = source.endpoint();
                let text =
                    format!("{at}: its migration is {status}; `sterna info {at}` shows what comes of it");
                return Err(Stop::with(Status::Undecided, text));
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// Why the migration is paused.
fn why(info: &Value) -> String {
    info["error-desc"].as_str().unwrap_or("no reason was given").to_owned()
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
