//! The primary's process, with the channels that judge and observer read.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use super::account;
use super::primary::ROLE;

/// Reports of the process to the judge.
#[derive(Debug, Clone, Default)]
pub(super) struct Told {
    pub(super) accounts: Vec<String>,
    pub(super) is_armed: bool,
    pub(super) has_reached: bool,
    /// How the protection ended at the primary.
    pub(super) ended: Option<String>,
}

pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    heard: Arc<Mutex<Vec<u8>>>,
    told: Arc<Mutex<Told>>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    pub(super) fn spawn(program: &Path, arguments: &[String]) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.arg(ROLE).args(arguments);
        // The process gets a group of its own, so that Ctrl-C reaches only the parent, which ends its
        // children.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| format!("a primary: {error}"))?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(mut output), Some(errors)) = pipes else {
            return Err("a primary without pipes".into());
        };
        let (heard, told) = (Arc::<Mutex<Vec<u8>>>::default(), Arc::<Mutex<Told>>::default());
        let hears = Arc::clone(&heard);
        let observer = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                hears.lock().extend_from_slice(&bytes[..read]);
            }
        });
        let tells = Arc::clone(&told);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                tells.lock().note(&line);
            }
        });
        Ok(Self { child, input: Some(input), heard, told, readers: vec![observer, reader] })
    }

    pub(super) fn arm(&self) {
        // A process that has ended does not read its input, so the write may fail.
        let _ = self.input.as_ref().map(|mut input| writeln!(input, "arm"));
    }

    pub(super) fn told(&self) -> Told {
        self.told.lock().clone()
    }

    pub(super) fn heard_bytes(&self) -> usize {
        self.heard.lock().len()
    }

    /// Sends a signal. The process has not been waited for, so its number cannot be reused.
    pub(super) fn signal(&self, signal: Signal) -> Result<(), String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).ok_or("no process")?;
        kill_process(pid, signal).map_err(|error| format!("{signal:?}: {error}"))
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the process, by SIGKILL or by closing its input. Returns its accounts and its complete output.
    pub(super) fn end(mut self, by_force: bool) -> (Vec<String>, Vec<u8>) {
        self.finish(by_force);
        (self.told().accounts, std::mem::take(&mut *self.heard.lock()))
    }

    fn finish(&mut self, by_force: bool) {
        self.input = None;
        if by_force {
            // An error means that the process has ended already.
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
        for reader in self.readers.drain(..) {
            drop(reader.join());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.finish(true);
    }
}

impl Told {
    fn note(&mut self, line: &str) {
        match line.split_once(' ') {
            Some((account::WORD, account)) => self.accounts.push(account.to_owned()),
            Some(("ended", how)) => self.ended = Some(how.to_owned()),
            None if line == "armed" => self.is_armed = true,
            None if line == "reached" => self.has_reached = true,
            _ => tracing::warn!(line, "a primary says"),
        }
    }
}
