//! `sterna decide`: ends a migration whose acknowledgement was lost, or rules on a protected guest, by an operator's word.

use serde_json::json;
use sterna_qmp::Endpoint;

use crate::exit::{Done, Status};
use crate::monitor::Monitor;
use crate::terminal;

/// Which migration or protection, and where its guest is.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source; of a protection: of the primary, of `sterna protect`, or of a Sterna VM that is the standby
    pub socket: Endpoint,
    /// Which side has the guest. Check the destination (of a protection: the standby) first: two running guests on one disk destroy it
    pub guest: Side,
}

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// The guest does not run at the destination or standby and never will: it resumes at the source
    Source,
    /// The guest runs at the destination or standby: the source stays stopped permanently
    Destination,
}

/// Decides.
pub fn execute(arguments: &Arguments) -> Done {
    let (word, then) = match arguments.guest {
        Side::Source => ("source", "the guest goes on at the source (of a protection: at the primary)"),
        Side::Destination => (
            "destination",
            "the destination (of a protection: the standby) has the guest; the source can be quit",
        ),
    };
    Monitor::connect(&arguments.socket)?.execute("x-sterna-decide", json!({ "guest": word }))?;
    terminal::note(then);
    Ok(Status::Done)
}
