//! `sterna takeover`: a standby's guest goes on there, by an operator's word.

use serde_json::{Map, Value};
use sterna_qmp::Endpoint;

use crate::exit::{Done, Status, Stop};
use crate::monitor::Monitor;
use crate::terminal;

/// Which standby, and how.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The word forces nothing. Where primary and standby are in contact, the standby gives up the contact, waits until the primary's \
lease is over, asks the arbiter, fences the primary, and starts the guest; with the arbiter `ask` this word is the claim. After a \
step that failed it is tried once more. Without a contact the word says that the primary's guest does not run any more.")]
pub struct Arguments {
    /// QMP socket of the standby (`sterna standby --qmp`, or a Sterna VM): unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// The primary makes a last checkpoint and stops its guest first; nothing is lost
    #[arg(long)]
    pub planned: bool,
    /// The primary's guest does not run and never will: go on although the fence has failed or there is none
    #[arg(long, conflicts_with = "planned")]
    pub vouch: bool,
    /// Make an image, although a VM waits for the guest
    #[arg(long)]
    pub image: bool,
}

/// Says so.
pub fn execute(arguments: &Arguments) -> Done {
    let mut monitor = Monitor::connect(&arguments.socket)?;
    // A VM that is a standby has neither fence nor image.
    let wishes = [("planned", arguments.planned), ("vouch", arguments.vouch), ("image", arguments.image)];
    let wish: Map<String, Value> = wishes
        .into_iter()
        .filter(|(_, is_wanted)| *is_wanted)
        .map(|(name, _)| (name.to_owned(), true.into()))
        .collect();
    if monitor.try_execute("x-sterna-query-protection", Value::Null).is_err() {
        return Err(Stop::usage(format!(
            "{} is no standby: name the socket of `sterna standby --qmp`",
            monitor.endpoint()
        )));
    }
    monitor.execute("x-sterna-takeover", wish.into())?;
    terminal::note(if arguments.planned {
        "the primary is asked for its guest; see `sterna info`"
    } else {
        "the takeover is under way; see `sterna info`"
    });
    Ok(Status::Done)
}
