//! `sterna decide`: an operator decides where the guest runs.
//! The decision ends a migration without acknowledgement, or answers for the arbiter `ask` of a protection.

use std::time::Duration;

use serde_json::json;
use sterna_qmp::Endpoint;

use super::migrate::wait_until_over;
use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// How long the command waits for a migration to end after the decision.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Which migration or protection, and where its guest is.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source of the migration. For a protection: the socket of the primary, of `sterna protect`, or
    /// of the Sterna VM that is the standby
    pub socket: Endpoint,
    /// Side that has the guest. Check the destination (for a protection: the standby) first, because two running guests
    /// destroy a shared disk
    pub guest: Side,
}

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// The guest does not run at the destination or standby and never will. It resumes at the source
    Source,
    /// The guest runs at the destination or standby. It stays stopped permanently at the source
    Destination,
}

/// Sends the decision to the VM and waits for a migration to end.
pub fn execute(arguments: &Arguments) -> Done {
    let (word, then) = match arguments.guest {
        Side::Source => ("source", "the guest resumes at the source (of a protection: at the primary)"),
        Side::Destination => (
            "destination",
            "the destination (of a protection: the standby) has the guest; the source can be quit",
        ),
    };
    let mut monitor = Monitor::connect(&arguments.socket)?;
    if !monitor.is_sterna() {
        let at = monitor.endpoint();
        return Err(Stop::usage(match arguments.guest {
            Side::Source => format!(
                "{at} is a QEMU, which does not wait for decisions: `sterna cancel {at}` ends a migration that still \
                 waits there, and `cont` resumes a guest that is stopped after one"
            ),
            Side::Destination => {
                format!("{at} is a QEMU, which does not wait for decisions: `quit` there ends the source")
            }
        }));
    }
    // A protection acts on the decision after both sides know it. Its own commands show that, so this command
    // does not wait.
    let is_migration = monitor
        .try_execute("query-migrate", serde_json::Value::Null)
        .is_ok_and(|query| query["x-sterna-undecided"] == true || query["status"] == "postcopy-paused");
    monitor.execute("x-sterna-decide", json!({ "guest": word }))?;
    if is_migration {
        let end = wait_until_over(&mut monitor, END_LIMIT);
        if let Some(end) = end.filter(|end| !end.is_over()) {
            let at = monitor.endpoint();
            return Err(Stop::with(
                Status::Undecided,
                format!(
                    "the decision is recorded, but the source has not acted on it within {} s (`{}`{}): `sterna info \
                     {at}` shows its state",
                    END_LIMIT.as_secs(),
                    end.status,
                    end.error.map_or(String::new(), |error| format!(", {error}"))
                ),
            ));
        }
    }
    terminal::note(then);
    Ok(Status::Done)
}
