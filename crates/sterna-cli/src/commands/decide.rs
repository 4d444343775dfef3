//! `sterna decide`: an operator decides where the guest runs.
//! The decision ends a migration without acknowledgement, or answers for the arbiter `ask` of a protection.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde_json::{Value, json};
use sterna_drive::Progress;
use sterna_qmp::{ClientError, Endpoint};

use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// How long the command waits for a migration to end after the decision.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two queries of the status.
const LOOK: Duration = Duration::from_millis(20);

/// Which migration or protection, and where its guest is.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source of the migration. For a protection: the socket of the primary, of `sterna protect`, or
    /// of the Sterna VM that is the standby
    pub socket: Endpoint,
    /// Side that has the guest. Check the destination (for a protection: the standby) first, because two running guests
    /// destroy a shared disk
    pub guest: Side,
    /// The status that you saw before you decided. In another status the decision is refused. Without this option, the
    /// command takes the status at its start, if a decision is possible in it
    #[arg(long, value_enum, value_name = "STATUS")]
    pub expect: Option<Seen>,
}

/// A status of the source in which a decision is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Seen {
    /// The acknowledgement was lost
    Undecided,
    /// The connection broke in postcopy. Counts as postcopy-recover, too
    PostcopyPaused,
    /// The source connects again in postcopy. Counts as postcopy-paused, too
    PostcopyRecover,
}

/// A side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// The guest does not run at the destination or standby and never will. It resumes at the source
    Source,
    /// The guest runs at the destination or standby. It stays stopped permanently at the source. In postcopy, an
    /// undecided source keeps the pages that the destination lacks; a decision in postcopy-paused gives them up
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
    let before = monitor.try_execute("query-migrate", Value::Null).unwrap_or_default();
    let was_undecided = before["x-sterna-undecided"] == true;
    decide(&mut monitor, word, arguments.expect, seen(&before))?;
    if was_undecided || is_in_postcopy(&before) {
        wait(&mut monitor, was_undecided)?;
    }
    terminal::note(then);
    Ok(Status::Done)
}

/// Sends the decision. It is refused if the status is not the one that the operator or this command has seen.
fn decide(monitor: &mut Monitor, guest: &str, given: Option<Seen>, seen: Option<Seen>) -> Result<(), Stop> {
    let Some(expect) = given.or(seen) else {
        return monitor.execute("x-sterna-decide", json!({ "guest": guest })).map(drop);
    };
    let value = expect.to_possible_value();
    let status = value.as_ref().map_or("", PossibleValue::get_name);
    match monitor.try_execute("x-sterna-decide", json!({ "guest": guest, "expect": status })) {
        // A VM of an earlier version.
        Err(ClientError::Refused { desc, .. })
            if given.is_none() && desc.contains("'expect' is unexpected") =>
        {
            monitor.execute("x-sterna-decide", json!({ "guest": guest })).map(drop)
        }
        decided => decided.map(drop).map_err(|error| monitor.stop(error)),
    }
}

/// The status in the answer to `query-migrate`, if a decision is possible in it.
fn seen(query: &Value) -> Option<Seen> {
    match query["status"].as_str() {
        _ if query["x-sterna-undecided"] == true => Some(Seen::Undecided),
        Some("postcopy-paused") => Some(Seen::PostcopyPaused),
        Some("postcopy-recover") => Some(Seen::PostcopyRecover),
        _ => None,
    }
}

/// Waits until the source has ended its migration.
///
/// # Errors
/// The source keeps pages after the decision about an undecided postcopy, or it does not act on the decision in time.
fn wait(monitor: &mut Monitor, was_undecided: bool) -> Result<(), Stop> {
    let until = Instant::now() + END_LIMIT;
    loop {
        let query = match monitor.try_execute("query-migrate", Value::Null) {
            Ok(query) => query,
            // The source has ended.
            Err(ClientError::Closed { .. } | ClientError::Io { .. }) => return Ok(()),
            Err(error) => return Err(monitor.stop(error)),
        };
        let progress = Progress::from_query(&query);
        if progress.is_over() {
            return Ok(());
        }
        let at = monitor.endpoint();
        if was_undecided && is_in_postcopy(&query) {
            return Err(Stop::with(Status::Undecided, pages_remain(&at.to_string())));
        }
        if Instant::now() >= until {
            return Err(Stop::with(
                Status::Undecided,
                format!(
                    "the decision is recorded, but the source has not acted on it within {} s (`{}`{}): `sterna info \
                     {at}` shows its state",
                    END_LIMIT.as_secs(),
                    progress.status,
                    progress.error.map_or(String::new(), |error| format!(", {error}"))
                ),
            ));
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether the guest is at the destination, and the source keeps or sends its pages.
fn is_in_postcopy(query: &Value) -> bool {
    let status = query["status"].as_str().unwrap_or_default();
    ["postcopy-paused", "postcopy-recover", "postcopy-active"].contains(&status)
}

fn pages_remain(at: &str) -> String {
    format!(
        "the destination has the guest, and lacks pages that only the source has: keep both running. `sterna recover \
         {at} ADDRESS` sends the pages, where ADDRESS is the destination's. If the guest is complete there or lost, \
         `sterna decide {at} destination` once more gives the pages up."
    )
}
