//! Runs a command under a time limit and keeps the end of its standard error.

use std::io::{self, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use super::line::CommandLine;
use crate::names::quoted;

/// Time within which a killed command must have ended.
const DYING: Duration = Duration::from_secs(1);
/// Interval at which a command without output is checked for its end.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes kept from the end of a command's standard error.
const KEPT: usize = 400;

/// How a command ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The command ended with this exit code.
    Exited(i32),
    /// The command ended without an exit code. The text says how; it follows the command's name in a message.
    Failed(String),
}

/// Runs a command with additional environment variables and an empty standard input.
///
/// Standard output is discarded. The second result is the end of the standard error, if there was any. At the
/// limit, the command is killed together with its process group.
pub(crate) fn run(
    line: &CommandLine,
    variables: &[(&str, String)],
    limit: Duration,
) -> (End, Option<String>) {
    let began = Instant::now();
    let mut command = Command::new(line.program());
    command.args(line.arguments());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return (End::Failed(format!("cannot be started: {error}")), None),
    };
    let mut said = Said::of(&mut child);
    let end = loop {
        match child.try_wait() {
            Ok(Some(status)) => break ended(status),
            Ok(None) if began.elapsed() >= limit => break killed(&mut child, limit),
            Ok(None) => said.wait(LOOK.min(limit.saturating_sub(began.elapsed()))),
            // A process that ignores SIGCHLD cannot read its children's exit status.
            Err(error) => break End::Failed(format!("ended, but its exit status is unknown: {error}")),
        }
    };
    said.take();
    let said = (!said.last.trim_ascii().is_empty()).then(|| quoted(&said.last));
    (end, said)
}

fn ended(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Exited(code),
        (None, Some(signal)) => End::Failed(format!("was ended by signal {signal}")),
        (None, None) => End::Failed(format!("ended with {status}")),
    }
}

fn killed(child: &mut Child, limit: Duration) -> End {
    // The child is not reaped yet, so no other process group can have its number.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if began.elapsed() < DYING => std::thread::sleep(LOOK),
            Ok(None) => {
                return End::Failed(format!(
                    "did not end within {limit:?}, and did not end when it was killed"
                ));
            }
            _ => return End::Failed(format!("did not end within {limit:?} and was killed")),
        }
    }
}

/// The end of a command's standard error.
///
/// Children of the command may keep the pipe open after the command has ended. The end of the pipe is therefore
/// not awaited.
struct Said {
    pipe: Option<ChildStderr>,
    last: Vec<u8>,
}

impl Said {
    fn of(child: &mut Child) -> Self {
        let pipe = child.stderr.take();
        // A blocking read would exceed the limit.
        let pipe = pipe.filter(|pipe| rustix::io::ioctl_fionbio(pipe, true).is_ok());
        Self { pipe, last: Vec::new() }
    }

    /// Waits at most `most` for new output and takes it.
    fn wait(&mut self, most: Duration) {
        let Some(pipe) = &self.pipe else { return std::thread::sleep(most) };
        let limit = Timespec::try_from(most).unwrap_or_default();
        let mut waited_for = [PollFd::new(pipe, PollFlags::IN)];
        if poll(&mut waited_for, Some(&limit)).is_ok_and(|ready| ready > 0) {
            self.take();
        }
    }

    /// Takes the output that is available now.
    fn take(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut buffer = [0; 4096];
        // The limit of 64 reads ends this loop even if the command writes without end.
        for _ in 0..64 {
            match pipe.read(&mut buffer) {
                Ok(count @ 1..) => {
                    self.last.extend_from_slice(&buffer[..count]);
                    let surplus = self.last.len().saturating_sub(KEPT);
                    self.last.drain(..surplus);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(0) | Err(_) => {
                    self.pipe = None;
                    return;
                }
            }
        }
    }
}
