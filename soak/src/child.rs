//! A side in a child process, so that it can be killed.
//!
//! Commands arrive on standard input, one per line. The child prints `reached` and `listening ADDRESS`. It
//! exits at the end of its input, so that no process outlives the soak.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use fork::Fork;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};
use sterna::{Address, Incoming, Migration, SourceVm, Status, TargetVm};
use sterna_guests::ProcessGuest;
use sterna_guests::process::Tracking;

use crate::bank::Bank;
use crate::ledger::Ledger;
use crate::schedule::{Blow, Case};
use crate::settings::Settings;
use crate::stage::Stage;
use crate::staged::Staged;
use crate::stop::{Side, Stop};

/// First command-line argument of a child process.
pub const ROLE: &str = "--child";

/// The parent's handle to a child process.
pub struct Process {
    child: Mutex<Child>,
    input: Mutex<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts `program` as `side` of `case`. Stops that the child reaches count on `stage`. For a
    /// destination, also returns its listening address.
    pub fn spawn(
        program: &Path,
        case: &Case,
        side: Side,
        to: Option<&Address>,
        stage: &Arc<Stage>,
    ) -> Result<(Self, Option<Address>), String> {
        let mut command = Command::new(program);
        command.args([ROLE, case.stop.label(), case.blow.label(), &case.seed.to_string()]);
        command.args(to.map(ToString::to_string));
        // The child gets a process group of its own, so that Ctrl-C reaches only the parent, which ends its
        // children.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| format!("a child: {error}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a child without pipes".into());
        };
        let (listening, heard) = channel();
        let stage = Arc::clone(stage);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.split_once(' ') {
                    Some(("listening", address)) => drop(listening.send(address.to_owned())),
                    _ if line == "reached" => stage.reached_elsewhere(),
                    _ => tracing::warn!(line, "a child says"),
                }
            }
        });
        let process = Self { child: Mutex::new(child), input: Mutex::new(input), reader: Some(reader) };
        let address = (side == Side::Destination).then(|| address_from(&heard)).transpose()?;
        Ok((process, address))
    }

    /// Lets the child continue from its stop.
    pub fn release(&self) {
        self.say("go");
    }

    /// Cancels the child's migration.
    pub fn cancel(&self) {
        self.say("cancel");
    }

    /// Kills the child and the processes that it forked. Waits until the kernel has released their resources.
    pub fn kill(&self) {
        let mut child = self.child.lock();
        // The group's number cannot be reused until the child has been waited for.
        if let (Ok(None), Some(group)) = (child.try_wait(), Pid::from_raw(child.id() as i32)) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
    }

    fn say(&self, what: &str) {
        // A killed child has closed its input, so the write may fail.
        let _ = writeln!(self.input.lock(), "{what}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
    }
}

fn address_from(heard: &Receiver<String>) -> Result<Address, String> {
    let text = heard
        .recv_timeout(Duration::from_secs(20))
        .map_err(|_| "the destination's process never listened")?;
    text.parse().map_err(|error| format!("{text:?}: {error}"))
}

/// Runs a child process. `arguments` are the arguments after [`ROLE`].
///
/// # Errors
/// The reason why the child cannot take part.
pub fn main(arguments: &[String]) -> Result<(), String> {
    let [stop, blow, seed, rest @ ..] = arguments else {
        return Err("a child needs a stop, a blow and a seed".into());
    };
    let blow = Blow::of_label(blow).ok_or_else(|| format!("there is no blow {blow:?}"))?;
    if blow == Blow::ForkSource && !become_daemon()? {
        return Ok(());
    }
    let stop = Stop::of_label(stop).ok_or_else(|| format!("there is no stop {stop:?}"))?;
    let seed = seed.parse().map_err(|_| format!("{seed:?} is no seed"))?;
    let settings = Settings::new(seed, stop);
    let side = if rest.is_empty() { Side::Destination } else { Side::Source };
    let wanted = stop.prelude().map(|(before, _)| before).into_iter().chain([stop]);
    let stage = Arc::new(Stage::new(wanted.filter(|stop| stop.side() == side)));
    let ledger = Arc::new(Ledger::with_owner(side));
    let text = |error: &dyn std::fmt::Display| error.to_string();

    let banks = Bank::all(&settings.banks, side == Side::Source)?;
    let mut migration = None;
    let mut incoming = None;
    if let [to] = rest {
        let to: Address = to.parse().map_err(|error| format!("{to:?}: {error}"))?;
        let guest = ProcessGuest::boot(settings.guest).map_err(|error| text(&error))?;
        guest.cont().map_err(|error| text(&error))?;
        let vm = Staged::new(guest, banks, Arc::clone(&stage), ledger, side);
        let (observer, vm) = (vm.observer(), vm as Arc<dyn SourceVm>);
        let started = Migration::start(vm, &to, settings.params, settings.capabilities, observer);
        migration = Some(started.map_err(|error| text(&error))?);
    } else {
        let guest = ProcessGuest::waiting(settings.guest).map_err(|error| text(&error))?;
        let vm = Staged::new(guest, banks, Arc::clone(&stage), ledger, side);
        let (observer, vm) = (vm.observer(), vm as Arc<dyn TargetVm>);
        let any = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        let listening = Incoming::listen(vm, &any, settings.params, settings.capabilities, observer);
        let listening = listening.map_err(|error| text(&error))?;
        say(&format!("listening {}", listening.address()));
        incoming = Some(listening);
    }

    let telling = Arc::clone(&stage);
    std::thread::spawn(move || {
        for times in 1.. {
            if !telling.wait_reached(Duration::from_secs(3600)) {
                return;
            }
            say("reached");
            telling.wait_released(times);
        }
    });
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match (line.as_str(), &migration) {
            ("go", migration) => {
                // A child that is not killed continues to the end. At this stop, an operator's setting ends
                // the migration.
                if let (Stop::LaterPass, Some(migration)) = (stop, migration) {
                    migration
                        .set_live(|params| params.downtime_limit = Duration::from_secs(1))
                        .expect("a live setting");
                }
                stage.release();
                while let Some(migration) =
                    migration.as_ref().filter(|it| it.status() == Status::PreSwitchover)
                {
                    let _ = migration.continue_switchover();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            ("cancel", Some(migration)) => {
                migration.cancel().map_err(|refusal| format!("cancelling a child: {refusal}"))?;
            }
            _ => return Err(format!("what is {line:?}?")),
        }
    }
    drop(incoming);
    Ok(())
}

/// Probes the tracking methods, as a VMM does at its start, and forks. Returns true in the child. Returns
/// false in the parent, after the child has ended.
fn become_daemon() -> Result<bool, String> {
    // The fork must not use the descriptors opened here for its own memory.
    let _ = Tracking::available();
    match fork::fork().map_err(|error| format!("fork: {error}"))? {
        Fork::Child => Ok(true),
        // The parent stays, so that a kill of the process group also finds the child.
        Fork::Parent(child) => {
            fork::waitpid(child).map_err(|error| format!("the forked child: {error}"))?;
            Ok(false)
        }
    }
}

fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    let _ = writeln!(output, "{line}");
    let _ = output.flush();
}
