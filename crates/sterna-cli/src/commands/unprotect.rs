//! `sterna unprotect`: ends a protection; the guest runs on at its primary.

use std::time::Duration;

use serde_json::Value;
use sterna_qmp::Endpoint;

use super::protect::own;
use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// The protection's command waits for its end itself, and a little less long.
const LIMIT: Duration = Duration::from_secs(120);

/// Which protection.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The socket of `sterna protect --qmp`, or of a Sterna VM: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
}

/// Ends it.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    monitor.set_limit(Some(LIMIT));
    let end = monitor.execute("x-sterna-unprotect", Value::Null)?;
    if end["runs_here"].is_null() {
        return own::unprotect(&mut monitor);
    }
    if end["runs_here"] != true {
        return Err(Stop::with(Status::Lost, "the standby has the guest; it was ended at its primary"));
    }
    for left in end["left"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        terminal::note(&format!("sterna: warning: {left}"));
    }
    terminal::note("the guest is not protected any more and runs on where it ran");
    Ok(Status::Done)
}
