//! `sterna takeover`: makes a standby take over the guest, on behalf of an operator.

use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use sterna_qmp::{ClientError, Endpoint};

use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// Interval between two queries of the standby.
const LOOK: Duration = Duration::from_millis(50);
/// How long a failed step may take to start again.
const RETRY_LIMIT: Duration = Duration::from_secs(2);

/// Which standby, and how.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
This command cannot start the guest on two sides:
  * If primary and standby are in contact, the standby closes the contact, waits until the
    primary's lease has ended, asks the arbiter, runs its fence, and starts the guest.
    With the arbiter `ask`, this command is the operator's claim.
  * A QEMU does not stop its guest by itself when the lease ends. Its takeover needs
    the standby's --fence, or --vouch here.
  * Without contact, this command declares that the primary's guest does not run any more.
A step that failed before is tried once more.

Exit status: 0 the standby has the guest; 1 a step failed: the standby still holds the checkpoint, and this command can be repeated; \
3 no result within --wait; 6 the primary keeps the guest, and the checkpoint is discarded.")]
pub struct Arguments {
    /// QMP socket of the standby (`sterna standby --qmp`, or a Sterna VM): unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// Planned takeover: the primary first stops its guest and sends a last checkpoint. No state of the guest is lost
    #[arg(long)]
    pub planned: bool,
    /// Declare that the primary's guest does not run and never will. The takeover then continues without a fence, or
    /// although the fence failed
    #[arg(long, conflicts_with = "planned")]
    pub vouch: bool,
    /// Write an image of the guest, even if a VM waits for it
    #[arg(long)]
    pub image: bool,
    /// Time limit in seconds for the result
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub wait: u64,
    /// Do not wait for the result: exit with status 0 as soon as the standby has accepted the command
    #[arg(long, conflicts_with = "wait")]
    pub no_wait: bool,
    /// Last resort if the arbiter will never answer again: write an image of the held checkpoint without a claim. The
    /// primary may have got the claim. Therefore --vouch is required: its guest must not run, now or later
    #[arg(long, requires = "image", requires = "vouch")]
    pub without_arbiter: bool,
}

/// Requests the takeover, and waits for its end.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    // A VM that is a standby has neither fence nor image, so unset wishes are not sent.
    let wishes = [
        ("planned", arguments.planned),
        ("vouch", arguments.vouch),
        ("image", arguments.image),
        ("without-arbiter", arguments.without_arbiter),
    ];
    let wish: Map<String, Value> = wishes
        .into_iter()
        .filter(|(_, is_wanted)| *is_wanted)
        .map(|(name, _)| (name.to_owned(), true.into()))
        .collect();
    let Ok(before) = monitor.try_execute("x-sterna-query-protection", Value::Null) else {
        return Err(Stop::usage(format!(
            "{} is not a standby: give the socket of `sterna standby --qmp`",
            monitor.endpoint()
        )));
    };
    if before["schema"].is_string() {
        // `sterna protect` answers when the guest is at the standby.
        monitor.set_limit(Some(Duration::from_secs(arguments.wait)));
        monitor.execute("x-sterna-takeover", wish.into())?;
        terminal::note("handed over: the standby has the guest");
        return Ok(Status::Done);
    }
    monitor.execute("x-sterna-takeover", wish.into())?;
    if arguments.no_wait {
        terminal::note(if arguments.planned {
            "the standby has asked the primary for its guest; `sterna info` shows the progress"
        } else {
            "the takeover is running; `sterna info` shows the progress"
        });
        return Ok(Status::Done);
    }
    wait(arguments, &mut monitor, &before)
}

/// Waits until the standby has the guest, or has failed.
fn wait(arguments: &Arguments, monitor: &mut Monitor, before: &Value) -> Done {
    let began = Instant::now();
    let limit = Duration::from_secs(arguments.wait);
    let mut last = before.clone();
    loop {
        match monitor.try_execute("x-sterna-query-protection", Value::Null) {
            Ok(now) => {
                let trouble = now["trouble"].as_str().filter(|trouble| last["trouble"] != *trouble);
                if let Some(trouble) = trouble {
                    terminal::note(&format!("{}: {trouble}", word(&now)));
                }
                last = now;
            }
            // `sterna standby` exits when the guest has its new place.
            Err(ClientError::Closed { .. } | ClientError::Io { .. }) => return gone(arguments, &last),
            Err(error) => return Err(monitor.stop(error)),
        }
        if let Some(end) = judge(arguments, &last, before, began.elapsed()) {
            return end;
        }
        if began.elapsed() >= limit {
            return Err(Stop::with(
                Status::Undecided,
                format!(
                    "the takeover has not ended after {} s (state `{}`); `sterna info {}` shows its state",
                    arguments.wait,
                    word(&last),
                    arguments.socket
                ),
            ));
        }
        std::thread::sleep(LOOK);
    }
}

fn word(report: &Value) -> &str {
    report["state"].as_str().unwrap_or("unknown")
}

/// The end of the takeover, if the report `now` shows one.
/// The report is a standby's, or a primary's, which has an `outcome`. `before`: the report when the command
/// was given.
fn judge(arguments: &Arguments, now: &Value, before: &Value, waited: Duration) -> Option<Done> {
    let trouble = now["trouble"].as_str().unwrap_or("no reason was given");
    let state = word(now);
    match now["outcome"].as_str() {
        Some("handed over") => {
            terminal::note("handed over: the standby has the guest");
            return Some(Ok(Status::Done));
        }
        Some("lost") => {
            return Some(Err(Stop::with(Status::Lost, format!("the standby has the guest ({trouble})"))));
        }
        Some(_) => {
            return Some(Err(Stop::failed(format!(
                "the standby has not taken over; the guest continues to run at the primary: {trouble}"
            ))));
        }
        None => {}
    }
    match state {
        "taken over" => {
            terminal::note("the standby has taken over: the guest runs there");
            Some(Ok(Status::Done))
        }
        // The old state is shown until the step starts again.
        "unready" | "unfenced" | "not started" | "holding"
            if state == word(before) && waited < RETRY_LIMIT =>
        {
            None
        }
        "unfenced" => Some(Err(Stop::failed(format!(
            "the standby has not taken over (`{state}`): {trouble}. It still holds the checkpoint. Repair the \
             standby's --fence command, then run `sterna takeover {0}`; or stop the primary's guest yourself, then \
             run `sterna takeover {0} --vouch`",
            arguments.socket
        )))),
        "unready" | "not started" => Some(Err(Stop::failed(format!(
            "the standby has not taken over (`{state}`): {trouble}. It still holds the checkpoint: remove the cause, \
             then run `sterna takeover {}` again",
            arguments.socket
        )))),
        "discarded" => Some(Err(Stop::with(
            Status::Discarded,
            format!("the standby does not get the guest, and its checkpoint is discarded: {trouble}"),
        ))),
        "failed" => Some(Err(Stop::failed(format!("the standby has failed: {trouble}")))),
        _ => None,
    }
}

/// The result when the standby's process has exited, or has closed its monitor.
fn gone(arguments: &Arguments, last: &Value) -> Done {
    match word(last) {
        "taken over" | "starting" => {
            terminal::note("the standby has taken over and has ended");
            Ok(Status::Done)
        }
        state => Err(Stop::with(
            Status::Undecided,
            format!(
                "the standby at {} closed its monitor during the takeover (last state `{state}`): its own output and \
                 exit status contain the result",
                arguments.socket
            ),
        )),
    }
}
