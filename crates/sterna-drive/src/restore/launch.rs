//! Starts a VM from its command line, so that it waits for a guest.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use sterna_qmp::{Client, Endpoint};

use crate::{DriveError, Vm, Watch, Wish};

/// How long a VM may take to start. Allocating all RAM in advance takes time.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long an unwanted VM's monitor may take to accept `quit`.
const QUIT_LIMIT: Duration = Duration::from_secs(1);

/// A VM that this process has started. It is killed when this is dropped, unless it was [released](Launched::release).
pub struct Launched {
    child: Child,
    directory: PathBuf,
    is_released: bool,
}

impl Launched {
    /// Starts `command` with its own QMP socket and `-incoming defer`, detached from this terminal. The socket and the
    /// VM's output are in `directory`, which is not removed.
    ///
    /// # Errors
    /// [`DriveError::Request`]: the program does not exist, or the command contains an `-incoming`.
    pub fn start(command: &[OsString], directory: &Path) -> Result<Self, DriveError> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(DriveError::Request(
                "a command must follow `--`, such as qemu-system-x86_64 …".into(),
            ));
        };
        if arguments.iter().any(|argument| is_option(argument, "incoming")) {
            return Err(DriveError::Request(
                "the command has an `-incoming` option: leave it out, because this command adds `-incoming defer`".into(),
            ));
        }
        if arguments.iter().any(|argument| is_option(argument, "daemonize")) {
            return Err(DriveError::Request(
                "the command has `-daemonize`: leave it out, because the VM is detached from this terminal anyway".into(),
            ));
        }
        let directory = directory.to_owned();
        let log_path = directory.join("log");
        let log = File::create(&log_path).map_err(|error| DriveError::file("create", &log_path, error))?;
        let log_too = log.try_clone().map_err(|error| DriveError::file("open", &log_path, error))?;
        let mut child = Command::new(program);
        child.args(arguments);
        let socket = socket(&directory);
        if Path::new(program).file_name() == Some(OsStr::new("sterna")) {
            child.arg("--incoming=defer").arg(format!("--qmp=unix:{}", socket.display()));
        } else {
            let monitor = format!("unix:{},server=on,wait=off", socket.display());
            child.args(["-incoming", "defer", "-qmp", &monitor]);
        }
        let child = child.stdin(Stdio::null()).stdout(log_too).stderr(log).process_group(0).spawn().map_err(
            |error| DriveError::Request(format!("cannot start {}: {error}", Path::new(program).display())),
        )?;
        Ok(Self { child, directory, is_released: false })
    }

    /// Connects to the VM's monitor as soon as it listens.
    ///
    /// # Errors
    /// [`DriveError::Failed`] with the VM's messages if it ended. [`DriveError::Cancelled`].
    pub fn vm(&mut self, watcher: &mut dyn Watch) -> Result<Vm, DriveError> {
        let endpoint = Endpoint::Unix(socket(&self.directory));
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Ok(vm) = Vm::connect_oob(&endpoint) {
                return Ok(vm);
            }
            // Also an exit status of 0 is an error here, for example after `--version`.
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(DriveError::Failed(format!("the VM ended with {status}{}", self.said())));
            }
            if Instant::now() > deadline {
                return Err(DriveError::Failed(format!(
                    "the VM has no monitor after {START_LIMIT:?}{}",
                    self.said()
                )));
            }
            if watcher.wish() != Wish::Continue {
                return Err(DriveError::Cancelled(
                    "cancelled; the VM that this command started was ended".into(),
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the VM's process has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Id of the VM's process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Path of the monitor's socket.
    pub fn socket(&self) -> PathBuf {
        socket(&self.directory)
    }

    /// Path of the file with the VM's messages.
    pub fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// The VM's messages so far, as the end of a sentence.
    pub fn said(&self) -> String {
        match std::fs::read_to_string(self.log()) {
            Ok(text) if !text.trim().is_empty() => format!("; its messages: {}", text.trim()),
            _ => String::new(),
        }
    }

    /// Lets the VM continue to run after this value is dropped.
    pub fn release(mut self) {
        self.is_released = true;
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if !self.is_released {
            // The process may be a script that has started the VM, so the whole group is killed, too. If the VM has
            // ended, all of these steps fail, as they should.
            if let Ok(mut monitor) = Client::connect(&Endpoint::Unix(socket(&self.directory)), QUIT_LIMIT) {
                let _ = monitor.execute("quit", Value::Null);
            }
            if let Some(group) = Pid::from_raw(self.child.id() as i32) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("qmp")
}

/// Whether `argument` is `-name` or `--name`, with or without a value after `=`.
fn is_option(argument: &OsStr, name: &str) -> bool {
    let text = argument.to_string_lossy();
    let text = text.trim_start_matches('-');
    argument.to_string_lossy().starts_with('-')
        && (text == name || text.split_once('=').is_some_and(|(n, _)| n == name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Progress;

    /// An operator with a constant wish.
    struct Operator(Wish);

    impl Watch for Operator {
        fn show(&mut self, _: &Progress) {}

        fn wish(&mut self) -> Wish {
            self.0
        }

        fn note(&mut self, _: &str) {}
    }

    fn shell(script: &str) -> Vec<OsString> {
        ["sh", "-c", script].map(OsString::from).to_vec()
    }

    #[test]
    fn vm_of_a_command_that_ends_well_is_an_error_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut launched = Launched::start(&shell("echo version 7"), directory.path()).unwrap();

        let error = launched.vm(&mut Operator(Wish::Continue)).err().expect("there is no VM").to_string();

        assert!(error.contains("version 7"), "{error}");
    }

    #[test]
    fn vm_that_never_comes_is_given_up_when_the_operator_cancels_and_nothing_of_it_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let mut launched = Launched::start(&shell("sleep 1000 & echo $!; wait"), directory.path()).unwrap();
        while launched.said().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let below = launched.said().rsplit(' ').next().and_then(|id| id.trim().parse::<i32>().ok()).unwrap();

        let error = launched.vm(&mut Operator(Wish::Cancel)).err();
        drop(launched);

        assert!(matches!(error, Some(DriveError::Cancelled(_))), "{error:?}");
        let gone = || {
            let state = std::fs::read_to_string(format!("/proc/{below}/stat")).unwrap_or_default();
            // An ended process may stay a zombie if no parent waits for it, for example in a container without init.
            state.is_empty() || state.contains(") Z ")
        };
        while !gone() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn start_of_a_command_that_daemonizes_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let command = ["qemu-system-x86_64", "-daemonize"].map(OsString::from);

        let error = Launched::start(&command, directory.path()).err().expect("refused").to_string();

        assert!(error.contains("-daemonize"), "{error}");
    }

    #[test]
    fn is_option_knows_one_and_two_dashes() {
        for text in ["-incoming", "--incoming", "--incoming=defer"] {
            assert!(is_option(OsStr::new(text), "incoming"), "{text}");
        }
        for text in ["incoming", "-incomings", "file=incoming"] {
            assert!(!is_option(OsStr::new(text), "incoming"), "{text}");
        }
    }
}
