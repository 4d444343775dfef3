//! A side in a process of its own, so that it can be killed.
//!
//! Both sides of a case write to one pipe, so that their reports have one order. A side writes each mark with
//! a number, and waits until that number returns on its standard input. A kill can therefore occur exactly at
//! a mark. The process exits at the end of its input.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna::{Address, Decision, Parameters};

use super::case::{Case, Kind};
use super::judge::{at_destination, at_source};
use super::side::{Here, There};
use crate::ledger::{Entry, Ledger};
use crate::stop::Side;

/// First command-line argument of a side's process.
pub const ROLE: &str = "--outages-side";

/// The parent's handle to a side's process.
pub(super) struct Process {
    child: Mutex<Child>,
    input: Mutex<ChildStdin>,
}

impl Process {
    /// Starts `program` as `side` of that case. It writes to `output`.
    pub(super) fn spawn(
        program: &Path,
        (case, seed, number): (Kind, u64, u64),
        side: Side,
        certificates: &Path,
        to: Option<&Address>,
        output: std::io::PipeWriter,
    ) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.args([ROLE, case.label(), &seed.to_string(), &number.to_string(), word(side)]);
        command.arg(certificates).args(to.map(ToString::to_string));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::from(output))
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let input = child.stdin.take().ok_or("a process without an input")?;
        Ok(Self { child: Mutex::new(child), input: Mutex::new(input) })
    }

    /// Sends a line. A killed process does not read it, so the write may fail.
    pub(super) fn say(&self, what: &str) {
        let _ = writeln!(self.input.lock(), "{what}");
    }

    /// Kills the process, and waits until the kernel has released its resources.
    pub(super) fn kill(&self) {
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Name of a side in arguments and lines.
pub(super) fn word(side: Side) -> &'static str {
    if side == Side::Source { "source" } else { "destination" }
}

/// Runs a side's process. `arguments` are the arguments after [`ROLE`].
///
/// # Errors
/// The reason why the side cannot take part.
pub fn main(arguments: &[String]) -> Result<(), String> {
    let [kind, seed, number, side, certificates, to @ ..] = arguments else {
        return Err("a side needs a kind, a seed, a number, a word and certificates".into());
    };
    let kind = Kind::of_label(kind).ok_or_else(|| format!("there is no kind {kind:?}"))?;
    let parsed = |text: &String| text.parse().map_err(|_| format!("{text:?} is no number"));
    let case = Case::new(kind, parsed(seed)?, parsed(number)?, None);
    let side = if side == word(Side::Source) { Side::Source } else { Side::Destination };
    let ledger = Ledger::telling(side, move |entry: Entry| say(side, &format!("ledger {}", entry.label())));
    let (ledger, gate, certificates) = (Arc::new(ledger), Arc::<Gate>::default(), Path::new(certificates));
    let told = {
        let gate = Arc::clone(&gate);
        move |mark: &str| gate.pass(side, mark)
    };
    let (tell, orders) = channel();
    std::thread::spawn(move || gate.listen(&tell));
    let address = |text: &String| text.parse().map_err(|error| format!("{text:?}: {error}"));
    if let [to] = to {
        source(&Here::begin(&case, &address(to)?, certificates, &ledger, told)?, &address(to)?, &orders);
    } else {
        let there = There::begin(&case, certificates, &ledger, told)?;
        say(side, &format!("listening {}", there.incoming.address()));
        destination(&there, &orders);
    }
    // Exits without joining threads, because the guest may wait for pages that cannot arrive any more.
    std::process::exit(0);
}

fn source(here: &Here, to: &Address, orders: &Receiver<String>) {
    let (side, migration, mut is_over) = (Side::Source, &here.migration, false);
    loop {
        if !is_over && let Some(outcome) = migration.outcome() {
            is_over = true;
            say(side, &format!("over {}", one_line(&outcome)));
        }
        let order = match orders.recv_timeout(Duration::from_millis(1)) {
            Ok(order) => order,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => continue,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let answer = match order.as_str() {
            "switch" => migration.start_postcopy().map_err(|why| why.to_string()),
            "resume" => migration.resume(to).map_err(|why| why.to_string()),
            "fast" => migration.set_live(unlimited).map_err(|why| why.to_string()),
            "decide here" => migration.decide(Decision::SourceRuns).map_err(|why| why.to_string()),
            "decide there" => migration.decide(Decision::DestinationRuns).map_err(|why| why.to_string()),
            "judge" => {
                say(side, &verdict(at_source(here)));
                continue;
            }
            other => Err(format!("what is {other:?}?")),
        };
        say(side, &format!("answer {}", answer.err().map_or("ok".to_owned(), |why| one_line(&why))));
    }
}

fn destination(there: &There, orders: &Receiver<String>) {
    let (side, incoming, mut is_over) = (Side::Destination, &there.incoming, false);
    loop {
        if !is_over && let Some(arrival) = incoming.arrival() {
            is_over = true;
            say(side, &format!("over {}", one_line(&arrival)));
        }
        let order = match orders.recv_timeout(Duration::from_millis(1)) {
            Ok(order) => order,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => continue,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
        };
        match order.as_str() {
            "abandon" => drop(incoming.cancel()),
            "judge" => say(side, &verdict(at_destination(there))),
            other => say(side, &format!("answer what is {other:?}?")),
        }
    }
}

fn unlimited(params: &mut Parameters) {
    params.max_bandwidth_bytes = 0;
    params.max_postcopy_bandwidth_bytes = 0;
}

fn verdict(at: Result<super::judge::At, String>) -> String {
    match at {
        Ok(at) => format!("verdict {}", at.label()),
        Err(why) => format!("verdict wrong: {}", one_line(&why)),
    }
}

fn one_line(what: &impl std::fmt::Debug) -> String {
    format!("{what:?}").replace('\n', " ")
}

/// Marks that wait for the return of their numbers.
#[derive(Default)]
struct Gate {
    state: Mutex<(u64, HashSet<u64>)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self, side: Side, mark: &str) {
        let mut state = self.state.lock();
        state.0 += 1;
        let own = state.0;
        say(side, &format!("mark {own} {mark}"));
        while !state.1.remove(&own) {
            self.changed.wait(&mut state);
        }
    }

    /// Reads numbers that return, and forwards orders.
    fn listen(&self, tell: &Sender<String>) {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.strip_prefix("go ").and_then(|number| number.parse().ok()) {
                Some(number) => {
                    self.state.lock().1.insert(number);
                    self.changed.notify_all();
                }
                None => drop(tell.send(line)),
            }
        }
        // The end of the input means that the parent has exited.
        std::process::exit(1);
    }
}

/// Writes a line in one call, so that lines of two processes do not mix.
fn say(side: Side, what: &str) {
    let mut line = format!("{} {what}", word(side));
    // Limits the line to a length that a pipe accepts atomically.
    line.truncate((0..=4000).rev().find(|&at| line.is_char_boundary(at)).unwrap_or(0));
    line.push('\n');
    let mut output = std::io::stdout().lock();
    let _ = output.write_all(line.as_bytes());
    let _ = output.flush();
}
