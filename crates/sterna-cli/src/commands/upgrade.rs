//! `sterna upgrade`: moves a guest to a new process on the same host without copying its memory.
//!
//! The new process is started with the given command line, waits for the guest, and takes it over. If a step
//! fails before the commit, the new process is ended. The guest then continues to run in the old process,
//! which is unchanged.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_qmp::Endpoint;

use super::migrate;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::terminal::{self, Live, Shown};
use crate::{summary, watch};

/// A VM with large memory on huge pages, or with many disks, needs time to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// A process listens at its socket immediately after it has created the socket's file.
const LISTEN_LIMIT: Duration = Duration::from_secs(2);
/// The source learns of a failure before the destination has finished its cleanup.
const REASON_LIMIT: Duration = Duration::from_secs(2);
const QUIT_LIMIT: Duration = Duration::from_secs(10);

/// Which VM, and what it becomes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// QMP socket of the VM: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// Command that starts the new process: `sterna run` with the options of the old process, such as vCPUs, RAM and
    /// disks, but with another monitor (`--qmp`). This command adds `--incoming` and `--same-host`. The new process has
    /// no terminal, and continues to run after this command has ended
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
    /// Append the new process's standard error to this file [default: print it if the process fails]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Migration parameter for the source, under QEMU's name
    #[arg(long, value_name = "NAME=VALUE", value_parser = super::pair)]
    pub set: Vec<(String, String)>,
    /// Print the record as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
}

/// Upgrades the process of the VM.
pub fn execute(arguments: &Arguments) -> Done {
    let monitor = check(arguments)?;
    let interrupts = Interrupts::catch()?;
    let mut old = Monitor::connect(&arguments.socket)?;
    if !old.is_sterna() {
        return Err(Stop::usage(format!(
            "{} is not a Sterna VM, and cannot pass its memory as file descriptors",
            arguments.socket
        )));
    }
    let state = old.run_state()?;
    if !matches!(state.as_str(), "running" | "paused") {
        return Err(Stop::failed(format!("{} is `{state}` and has no guest to move", arguments.socket)));
    }
    let directory = tempfile::Builder::new().prefix("sterna-upgrade-").tempdir();
    let mut directory = directory
        .map_err(|error| Stop::failed(format!("cannot create a directory for the socket: {error}")))?;
    let mut new = NewProcess::start(arguments, directory.path())?;
    new.wait_until_it_listens(&interrupts)?;
    // The new process's monitor tells why it refuses a guest.
    let mut monitor = monitor.as_ref().map(Monitor::connect).transpose()?;

    let live = Live::new(arguments.shown, arguments.json);
    let order = order(arguments, &new);
    let record = match migrate::drive(&order, &mut old, monitor.as_mut(), &live, &interrupts) {
        Ok(record) => record,
        Err(stop) => {
            // The migration may continue without this command.
            if matches!(stop.status, Status::Detached | Status::Undecided) {
                new.leave();
                directory.disable_cleanup(true);
            }
            return Err(stop);
        }
    };
    live.end();
    terminal::print(&if arguments.json { record.to_json() } else { summary::table(&record) });
    let end = watch::end(&record, &mut old).map_err(|stop| match monitor.as_mut().and_then(why) {
        Some(why) if stop.status == Status::Failed => {
            stop.with_more(&format!("; the new process reports: {why}"))
        }
        _ => stop,
    });
    match &end {
        Ok(_) => {
            let pid = new.leave();
            end_old(&mut old, &arguments.socket);
            if state == "running"
                && let Some(why) = monitor.as_mut().and_then(not_started)
            {
                return Err(Stop::failed(format!(
                    "process {pid} has the guest and could not start it: {why}. The guest is stopped there, and the \
                     old process has ended: remove the cause, then send `cont` to the new process"
                )));
            }
            terminal::note(&format!("the guest runs in process {pid}"));
        }
        // The guest may run in the new process.
        Err(stop) if stop.status == Status::Undecided => {
            let pid = new.leave();
            // The source continues to ask the new process at its socket in this directory.
            directory.disable_cleanup(true);
            terminal::note(&format!("process {pid} may have the guest: check it before you decide"));
        }
        Err(_) => new.end(),
    }
    end
}

/// Refuses wrong arguments before a process is started. Returns the new process's monitor, if it has one.
fn check(arguments: &Arguments) -> Result<Option<Endpoint>, Stop> {
    let words: Vec<_> = arguments.command.iter().map(|word| word.to_string_lossy()).collect();
    let is = |word: &str, option: &str| word == option || word.starts_with(&format!("{option}="));
    if words.iter().any(|word| is(word, "--incoming")) {
        return Err(Stop::usage("leave `--incoming` out of the new process's command: this command adds it"));
    }
    if words.get(1).is_some_and(|word| word == "run") && !words.iter().any(|word| is(word, "--qmp")) {
        return Err(Stop::usage(
            "the new process has no monitor, so its guest could not be paused, migrated or ended: add \
             `--qmp=unix:PATH` to its command",
        ));
    }
    let monitor = words.iter().enumerate().find_map(|(at, word)| match word.strip_prefix("--qmp=") {
        Some(value) => Some(value.to_owned()),
        None if word == "--qmp" => words.get(at + 1).map(ToString::to_string),
        None => None,
    });
    let monitor = monitor.and_then(|monitor| monitor.parse::<Endpoint>().ok());
    match monitor {
        Some(monitor) if monitor.to_string() == arguments.socket.to_string() => Err(Stop::usage(format!(
            "the new process needs another monitor socket: the old process uses {monitor} until the guest has moved"
        ))),
        monitor => Ok(monitor),
    }
}

/// Why the new process refuses the guest.
fn why(new: &mut Monitor) -> Option<String> {
    let until = Instant::now() + REASON_LIMIT;
    loop {
        let progress = new.progress().ok()?;
        if progress.error.is_some() || Instant::now() > until {
            return progress.error;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Why the guest does not run in the new process; none if it runs.
fn not_started(new: &mut Monitor) -> Option<String> {
    if new.run_state().ok()? == "running" {
        return None;
    }
    Some(new.progress().ok()?.error.unwrap_or_else(|| "its messages contain the reason".to_owned()))
}

fn order(arguments: &Arguments, new: &NewProcess) -> migrate::Arguments {
    migrate::Arguments {
        socket: arguments.socket.clone().into(),
        destination: new.address(),
        dest_qmp: None,
        paused: false,
        postcopy: None,
        reconnect_window: None,
        same_host: true,
        set: arguments.set.clone(),
        cap: Vec::new(),
        keep_settings: false,
        via: None,
        forecast: false,
        bandwidth: None,
        tls_dir: None,
        json: arguments.json,
        shown: arguments.shown,
        report: None,
        undecided_wait: 30,
    }
}

/// Quits the old process, which has no guest any more.
fn end_old(old: &mut Monitor, socket: &Endpoint) {
    // The process may exit before its answer is sent.
    let _ = old.try_execute("quit", Value::Null);
    let until = Instant::now() + QUIT_LIMIT;
    while old.try_execute("query-status", Value::Null).is_ok() {
        if Instant::now() > until {
            terminal::note(&format!("sterna: warning: the old process, at {socket}, does not end: kill it"));
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The new process. Dropping it kills the process, unless [`leave`](Self::leave) was called.
struct NewProcess {
    child: Option<Child>,
    pid: u32,
    socket: PathBuf,
    log: PathBuf,
}

impl NewProcess {
    fn start(arguments: &Arguments, directory: &Path) -> Result<Self, Stop> {
        let socket = directory.join("guest");
        let log = arguments.log.clone().unwrap_or_else(|| directory.join("log"));
        let name = arguments.command[0].to_string_lossy();
        let failed = |error: std::io::Error| {
            Stop::failed(format!("cannot start {name}: {error}; the guest is unchanged"))
        };
        let file: File = OpenOptions::new().create(true).append(true).open(&log).map_err(failed)?;
        let child = Command::new(&arguments.command[0])
            .args(&arguments.command[1..])
            .arg(format!("--incoming=unix:{}", socket.display()))
            .arg("--same-host")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            // Its own process group, so that Ctrl-C reaches only this command.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Self { pid: child.id(), child: Some(child), socket, log })
    }

    fn address(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    fn wait_until_it_listens(&mut self, interrupts: &Interrupts) -> Result<(), Stop> {
        let until = Instant::now() + START_LIMIT;
        let mut exists_since = None;
        while !self.is_listening(&mut exists_since) {
            if let Some(child) = &mut self.child
                && let Ok(Some(status)) = child.try_wait()
            {
                return Err(Stop::failed(format!(
                    "the new process ended with {status}{}; the guest stays in the old process",
                    self.said()
                )));
            }
            if interrupts.count() > 0 {
                return Err(Stop::with(Status::Cancelled, "cancelled; the guest stays in the old process."));
            }
            if Instant::now() > until {
                return Err(Stop::failed(format!(
                    "the new process was not ready for the guest after {START_LIMIT:?}{}; the guest stays in the old \
                     process",
                    self.said()
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Whether the new process listens. The socket's file exists before that, and a connection is refused then.
    ///
    /// Makes no connection, because the new process would mistake it for the source's. The kernel's list does not have
    /// a socket of another network namespace; after [`LISTEN_LIMIT`] the file is therefore enough.
    fn is_listening(&self, exists_since: &mut Option<Instant>) -> bool {
        const ACCEPTS: u32 = 1 << 16;
        if !self.socket.exists() {
            return false;
        }
        if exists_since.get_or_insert_with(Instant::now).elapsed() > LISTEN_LIMIT {
            return true;
        }
        // Columns: number, references, protocol, flags, type, state, inode, path.
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        sockets.lines().any(|line| {
            let mut words = line.split_whitespace();
            let flags = words.nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
            flags.is_some_and(|flags| flags & ACCEPTS != 0)
                && words.nth(3).map(Path::new) == Some(self.socket.as_path())
        })
    }

    /// The process's standard error, as the end of an error message.
    fn said(&self) -> String {
        match std::fs::read_to_string(&self.log) {
            Ok(text) if !text.trim().is_empty() => format!("; its messages: {}", text.trim()),
            _ => String::new(),
        }
    }

    /// Lets the process outlive this command. Returns its process id.
    fn leave(&mut self) -> u32 {
        self.child = None;
        self.pid
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both calls fail if the process has already exited, which is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for NewProcess {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(command: &[&str]) -> Arguments {
        Arguments {
            socket: "unix:/run/a.qmp".parse().unwrap(),
            command: command.iter().map(OsString::from).collect(),
            log: None,
            set: Vec::new(),
            json: false,
            shown: Shown::default(),
        }
    }

    #[test]
    fn command_that_cannot_work_is_refused_before_it_is_started() {
        for (command, word) in [
            (&["sterna", "run", "--incoming", "defer"][..], "--incoming"),
            (&["sterna", "run", "--incoming=defer"], "--incoming"),
            (&["sterna", "run", "--qmp", "unix:/run/a.qmp"], "another monitor socket"),
            (&["sterna", "run", "--qmp=/run/a.qmp"], "another monitor socket"),
        ] {
            let stop = check(&arguments(command)).unwrap_err();
            assert!(stop.status == Status::Usage && stop.message.contains(word), "{}", stop.message);
        }
        assert!(check(&arguments(&["sterna", "run", "--qmp", "unix:/run/b.qmp"])).is_ok());
    }

    #[test]
    fn process_whose_socket_exists_is_awaited_until_it_listens() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest");
        let server = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let mut new = NewProcess { child: None, pid: 0, socket: path.clone(), log: directory.path().into() };
        let listens = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            listen(&server, 1).unwrap();
            server
        });

        new.wait_until_it_listens(&Interrupts::default()).unwrap_or_else(|stop| panic!("{}", stop.message));

        std::os::unix::net::UnixStream::connect(&path).expect("no connection is refused");
        drop(listens.join().unwrap());
    }

    #[test]
    fn process_that_ends_at_once_is_quoted() {
        let directory = tempfile::tempdir().unwrap();
        let arguments = arguments(&["/bin/sh", "-c", "echo no such machine >&2; exit 3"]);
        let mut new = NewProcess::start(&arguments, directory.path()).unwrap();
        let stop = new.wait_until_it_listens(&Interrupts::default()).unwrap_err();
        assert!(
            stop.message.contains("no such machine") && stop.message.contains("stays in the old"),
            "{}",
            stop.message
        );
    }
}
