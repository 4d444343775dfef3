//! `sterna recover`: resumes a postcopy migration over a new connection after the old one broke.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_drive::{DriveError, Vm};
use sterna_qmp::{ClientError, Endpoint};

use crate::exit::{Done, Status, Stop};
use crate::monitor::{Monitor, unreachable};
use crate::terminal;

/// Interval between two queries of the status.
const LOOK: Duration = Duration::from_millis(50);

/// How long the destination's monitor may take to answer.
/// While the machine is blocked on a missing page, a new client gets its answer only after the page has
/// arrived.
const DESTINATION_ANSWERS: Duration = Duration::from_secs(5);

/// How long a paused destination may take to answer a command that needs its machine.
const PAUSED_ANSWERS: Duration = Duration::from_secs(2);

/// Which migration, and where its destination is.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source, whose status is postcopy-paused
    pub socket: Endpoint,
    /// Address of the destination: tcp:HOST:PORT or unix:PATH
    #[arg(value_parser = super::migrate::address)]
    pub uri: String,
    /// QMP socket of the destination. This command makes it listen at the address, unless it still listens at an
    /// address to which URI leads. Without this option the destination must already listen at URI
    #[arg(long, value_name = "SOCKET")]
    pub dest_qmp: Option<Endpoint>,
    /// First close the connection with `migrate-pause`, with --dest-qmp on both sides. Use this option if the
    /// connection is dead but the status is still postcopy-active, because the sides have not detected it
    #[arg(long)]
    pub pause: bool,
    /// Time in seconds to wait until both sides are paused, and until pages arrive again
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub patience: u64,
}

/// Resumes the migration and reports the result.
pub fn execute(arguments: &Arguments) -> Done {
    let patience = Duration::from_secs(arguments.patience);
    let mut source = Monitor::connect(&arguments.socket)?;
    if arguments.pause {
        pause(&source.endpoint().to_string(), source.vm())?;
    }
    // The source must be paused first. A destination that listens accepts any connection, and a source that
    // is not paused cannot connect.
    wait(&mut source, patience, "postcopy-paused", arguments)?;
    let mut destination = match &arguments.dest_qmp {
        Some(socket) => reach(socket, arguments)?,
        None => None,
    };
    let mut listening = Listening::Unchanged;
    let mut failed = None;
    let is_elsewhere = match &mut destination {
        Some(vm) => listens_elsewhere(vm, &arguments.uri, patience)?,
        None => false,
    };
    if is_elsewhere {
        // The address may lead to the destination through a relay, or it may be a new one. Only an attempt
        // shows which.
        failed = resume(&mut source, patience, arguments)?;
    }
    if let Some(vm) = &mut destination
        && (!is_elsewhere || failed.is_some())
    {
        check_has_guest(vm)?;
        listening = listen_again(vm, arguments, patience)?;
        failed = resume(&mut source, patience, arguments)?;
    } else if !is_elsewhere {
        failed = resume(&mut source, patience, arguments)?;
    }
    if let Some(why) = failed {
        let next = match (listening, &arguments.dest_qmp) {
            (Listening::Refused, Some(at)) => format!(
                "The destination does not listen at any address now: run `migrate-recover` at {at} with an address of \
                 its own host, then run `sterna recover` again without --dest-qmp."
            ),
            (_, None) => {
                "Remove the cause, then run `sterna recover` again, with --dest-qmp if the destination no longer \
                 listens."
                    .to_owned()
            }
            _ => "Remove the cause, then run `sterna recover` again.".to_owned(),
        };
        let text = format!("the migration stays paused, and nothing is lost: {why}. {next}");
        return Err(Stop::with(Status::Undecided, text));
    }
    terminal::note(&format!(
        "the migration continues; `sterna info {}` shows the progress, and so does `sterna migrate` if it still runs",
        source.endpoint()
    ));
    Ok(Status::Done)
}

/// Makes the source connect again. Returns the reason if that fails.
fn resume(source: &mut Monitor, patience: Duration, arguments: &Arguments) -> Result<Option<String>, Stop> {
    let before = why(&source.execute("query-migrate", Value::Null)?);
    source.execute("migrate", json!({ "uri": arguments.uri, "resume": true }))?;
    attempt(source, patience, &before)
}

/// The destination's state after the request to listen again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listening {
    /// It listens, as far as this command knows.
    Unchanged,
    /// It could not listen. In that case, a QEMU also closes its earlier address (observed: 11.1).
    Refused,
}

/// Executes `migrate-pause`. A refusal is only printed, because the connection may already be known to be
/// broken.
fn pause(at: &str, vm: &mut Vm) -> Result<(), Stop> {
    match vm.migrate_pause() {
        Ok(()) => Ok(()),
        Err(ClientError::Refused { desc, .. }) => {
            terminal::note(&format!("sterna: {at} did not close its connection: {desc}"));
            Ok(())
        }
        Err(error) => Err(DriveError::Monitor { at: at.to_owned(), error }.into()),
    }
}

/// The destination's monitor, if it answers.
/// Commands are sent out of band where possible, because a machine that is blocked on a missing page answers
/// no others.
fn reach(socket: &Endpoint, arguments: &Arguments) -> Result<Option<Vm>, Stop> {
    let mut vm = match Vm::connect_oob_within(socket, DESTINATION_ANSWERS) {
        Ok(vm) => vm,
        Err(ClientError::TimedOut { .. }) => {
            terminal::note(&format!(
                "sterna: warning: {socket} does not answer within {DESTINATION_ANSWERS:?}: another client uses that \
                 monitor, or the VM waits for a page. A QEMU still listens at its first address; trying {} without \
                 changing the destination",
                arguments.uri
            ));
            return Ok(None);
        }
        Err(error) => return Err(unreachable(socket, &error)),
    };
    if arguments.pause {
        pause(&socket.to_string(), &mut vm)?;
    }
    Ok(Some(vm))
}

/// Whether the destination is paused and listens at another port or path than `uri`.
/// False if the destination does not answer because its machine is blocked on a missing page.
fn listens_elsewhere(vm: &mut Vm, uri: &str, patience: Duration) -> Result<bool, Stop> {
    let until = Instant::now() + patience;
    loop {
        let Some(info) = check_has_guest(vm)? else { return Ok(false) };
        if info["status"] == "postcopy-paused" {
            return Ok(is_another(uri, &info["socket-address"][0]));
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
}

/// The destination's answer to `query-migrate`; none if it does not answer.
///
/// # Errors
/// The destination has discarded its guest.
fn check_has_guest(vm: &mut Vm) -> Result<Option<Value>, Stop> {
    let limit = vm.client().limit();
    vm.client().set_limit(PAUSED_ANSWERS);
    let info = vm.try_execute("query-migrate", Value::Null);
    vm.client().set_limit(limit);
    match info {
        Ok(info) if info["status"] == "failed" => Err(Stop::failed(given_up(vm.at()))),
        Ok(info) => Ok(Some(info)),
        Err(ClientError::Closed { .. } | ClientError::Io { .. }) => Err(Stop::failed(given_up(vm.at()))),
        Err(_) => Ok(None),
    }
}

/// The error for a destination that has discarded its guest (specs/postcopy.md §5).
fn given_up(at: &str) -> String {
    format!(
        "the destination at {at} has discarded its guest, and the migration cannot continue. A QEMU 11 does this when \
         a connection to its address ends before it has sent anything, such as a port scan or a health check. End \
         both VMs, and start the guest from its disks or from an image"
    )
}

/// Whether `place`, the `socket-address` of a VM, has another port or path than `uri`.
fn is_another(uri: &str, place: &Value) -> bool {
    let address = uri.split_once(':').map_or("", |(_, address)| address);
    match (place["port"].as_str(), place["path"].as_str()) {
        (Some(port), _) => {
            address.split(',').next().and_then(|it| it.rsplit_once(':')).map(|it| it.1) != Some(port)
        }
        (_, Some(path)) => address != path,
        _ => false,
    }
}

/// Makes the destination listen again at `arguments.uri`.
fn listen_again(vm: &mut Vm, arguments: &Arguments, patience: Duration) -> Result<Listening, Stop> {
    let at = vm.at().to_owned();
    let until = Instant::now() + patience;
    loop {
        match vm.migrate_recover(&arguments.uri) {
            Ok(()) => return Ok(Listening::Unchanged),
            // It already listens, because of an earlier attempt.
            Err(ClientError::Refused { desc, .. }) if desc.contains("triggered already") => {
                return Ok(Listening::Unchanged);
            }
            Err(ClientError::Refused { desc, .. })
                if desc.contains("already in use") || desc.contains("Cannot assign") =>
            {
                terminal::note(&format!(
                    "sterna: {at} cannot listen at {0} ({desc}); trying {0} without changing the destination",
                    arguments.uri
                ));
                return Ok(Listening::Refused);
            }
            // It has not noticed the broken connection yet. A QEMU reports this only in the text of the
            // error.
            Err(ClientError::Refused { desc, .. }) if desc.contains("paused") && Instant::now() < until => {
                std::thread::sleep(LOOK);
            }
            Err(ClientError::TimedOut { .. }) if Instant::now() < until => {}
            Err(error) => {
                let more = match &error {
                    ClientError::Refused { desc, .. } if desc.contains("paused") && !arguments.pause => {
                        ". If its connection is dead and it has not detected that, add --pause, which closes the \
                         connection"
                    }
                    _ => "",
                };
                return Err(Stop::from(DriveError::Monitor { at, error }).with_more(more));
            }
        }
    }
}

/// Waits until the attempt has succeeded. Otherwise, returns the reason of the failure.
///
/// The source keeps its status and the reason `before` for a moment.
/// It starts the attempt when nothing arrives over the lost connection any more.
fn attempt(source: &mut Monitor, patience: Duration, before: &str) -> Result<Option<String>, Stop> {
    let until = Instant::now() + patience;
    let mut has_begun = false;
    loop {
        // One query returns status and reason of the same moment.
        let info = source.execute("query-migrate", Value::Null)?;
        let is_late = Instant::now() >= until;
        match info["status"].as_str().unwrap_or("none") {
            "postcopy-active" | "completed" => return Ok(None),
            "postcopy-paused" if has_begun || is_late || why(&info) != before => return Ok(Some(why(&info))),
            "postcopy-paused" => {}
            // QEMU 11 connects in the first status, and requests bitmaps in the second.
            "postcopy-recover-setup" | "postcopy-recover" if !is_late => has_begun = true,
            status => {
                let at = source.endpoint();
                let text = format!("{at}: its migration is {status}; `sterna info {at}` shows the result");
                return Err(Stop::with(Status::Undecided, text));
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// The reason why the migration is paused.
fn why(info: &Value) -> String {
    info["error-desc"].as_str().unwrap_or("no reason was given").to_owned()
}

/// Waits until the monitor's migration has the status `wanted`.
fn wait(monitor: &mut Monitor, patience: Duration, wanted: &str, arguments: &Arguments) -> Result<(), Stop> {
    let until = Instant::now() + patience;
    loop {
        let info = monitor.execute("query-migrate", Value::Null)?;
        let status = info["status"].as_str().unwrap_or("none");
        if status == wanted {
            return Ok(());
        }
        let may_pause = status.starts_with("postcopy-");
        if !may_pause || Instant::now() >= until {
            let what = match status {
                "postcopy-active" if !arguments.pause => {
                    "if its connection is dead and it has not detected that, add --pause, which closes the connection"
                        .to_owned()
                }
                "postcopy-recover-setup" | "postcopy-recover" => {
                    "another recovery is running; `sterna info` shows its result".to_owned()
                }
                _ => "only a postcopy whose connection broke can be recovered".to_owned(),
            };
            return Err(Stop::failed(format!(
                "{}: its migration is {status} instead of {wanted}: {what}",
                monitor.endpoint()
            )));
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destination_behind_a_relay_listens_at_another_port_or_path() {
        let tcp = json!({"type": "inet", "host": "0.0.0.0", "port": "4444"});
        let unix = json!({"type": "unix", "path": "/run/b"});

        for same in ["tcp:h:4444", "tcp:[::1]:4444", "tcp:h:4444,ipv4=on"] {
            assert!(!is_another(same, &tcp), "{same}");
        }
        assert!(is_another("tcp:h:4445", &tcp) && is_another("unix:/run/b", &tcp));
        assert!(is_another("unix:/run/c", &unix) && !is_another("unix:/run/b", &unix));
        assert!(!is_another("tcp:h:4444", &Value::Null), "it listens nowhere");
    }
}
