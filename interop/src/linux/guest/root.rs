//! The guest's work in a root of Debian packages: files that it writes, makes last and reads back, and stress-ng.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::mount::{MountFlags, UnmountFlags, unmount};

use super::content;
use crate::lab::mount;

/// Where the root is mounted.
const AT: &str = "/root";
/// Files that are written in turns.
const FILES: u64 = 16;
const FILE_BYTES: usize = 96 << 10;
/// For reads that pass by the cache.
const ALIGNMENT: usize = 4096;
/// What writes memory all the time and looks whether it holds what was written.
const STRESS: [&str; 10] = [
    "stress-ng",
    "--vm=1",
    "--vm-bytes=16m",
    "--vm-method=rand-set",
    "--vm-keep",
    "--verify",
    "--timeout=0",
    "--temp-path=/tmp",
    "--no-rand-seed",
    "--metrics-brief",
];
/// What stress-ng says when it has found no fault.
const NO_FAULT: &str = "failed: 0";

/// The root at work.
pub(super) struct Root {
    stress: Child,
    /// The step that has written each file; 0: none.
    written: Vec<u64>,
    wrong: usize,
}

/// A program of the root, ready to be run in it.
pub(super) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(Path::new(AT).join("bin/busybox"));
    command.args(["chroot", AT]).args(arguments).stdin(Stdio::null());
    command.env("PATH", "/usr/sbin:/usr/bin").env("HOME", "/root");
    command
}

/// Mounts the root that is on this disk. Ends the guest if there is none.
pub(super) fn open(device: &str) {
    let must = |result: Result<(), String>| result.unwrap_or_else(|why| panic!("{why}"));
    must(mount(device, "ext4", AT, MountFlags::empty(), ""));
    for (source, kind, at) in [
        ("proc", "proc", "proc"),
        ("sysfs", "sysfs", "sys"),
        ("devtmpfs", "devtmpfs", "dev"),
        ("run", "tmpfs", "run"),
    ] {
        must(mount(source, kind, &format!("{AT}/{at}"), MountFlags::empty(), ""));
    }
    must(std::fs::create_dir_all(work()).map_err(|error| error.to_string()));
}

impl Root {
    /// Begins to work in it.
    pub(super) fn begin(device: &str) -> Self {
        open(device);
        let stress = command(&STRESS).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let stress = stress.unwrap_or_else(|error| panic!("stress-ng: {error}"));
        Self { stress, written: vec![0; FILES as usize], wrong: 0 }
    }

    /// Replaces a file by a new one that lasts, and reads another one.
    pub(super) fn step(&mut self, number: u64) {
        let (new, place) = (work().join("new"), file(number % FILES));
        let done = File::create(&new)
            .and_then(|mut file| {
                file.write_all(&content(number, FILE_BYTES))?;
                file.sync_all()
            })
            .and_then(|()| std::fs::rename(&new, place));
        self.wrong += usize::from(done.is_err());
        self.written[(number % FILES) as usize] = number;
        self.look((number + 1) % FILES);
    }

    /// Reads everything again, ends all programs, and leaves the disk alone. The number of files that were wrong; why stress-ng
    /// found a fault or ended by itself.
    pub(super) fn finish(mut self) -> (usize, Option<String>) {
        (0..FILES).for_each(|place| self.look(place));
        let complaint = self.end_stress();
        for at in ["run", "dev", "sys", "proc", ""] {
            if let Err(error) = unmount(Path::new(AT).join(at), UnmountFlags::empty()) {
                return (self.wrong, Some(format!("{AT}/{at} is not unmounted: {error}")));
            }
        }
        (self.wrong, complaint)
    }

    fn end_stress(&mut self) -> Option<String> {
        if let Ok(Some(status)) = self.stress.try_wait() {
            return Some(format!("stress-ng ended by itself with {status}: {}", self.said()));
        }
        // As by Ctrl-C: it looks at its memory once more.
        let pid = rustix::process::Pid::from_child(&self.stress);
        if let Err(error) = rustix::process::kill_process(pid, rustix::process::Signal::INT) {
            return Some(format!("stress-ng: {error}"));
        }
        let status = self.stress.wait();
        let said = self.said();
        let has_worked = operations(&said).is_some_and(|count| count > 0);
        match status {
            Ok(status) if status.success() && has_worked && said.contains(NO_FAULT) => None,
            status => Some(format!("stress-ng ended with {status:?}: {said}")),
        }
    }

    fn said(&mut self) -> String {
        let mut text = String::new();
        // Nothing can be said if it cannot be read.
        let _ = self.stress.stdout.take().map(|mut output| output.read_to_string(&mut text));
        let _ = self.stress.stderr.take().map(|mut output| output.read_to_string(&mut text));
        text.replace('\n', "; ")
    }

    /// Passes by the cache.
    fn look(&mut self, place: u64) {
        let number = self.written[place as usize];
        if number == 0 {
            return;
        }
        let mut bytes = vec![0; FILE_BYTES + ALIGNMENT];
        let from = bytes.as_ptr().align_offset(ALIGNMENT);
        let bytes = &mut bytes[from..from + FILE_BYTES];
        let read = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(file(place))
            .and_then(|mut file| file.read_exact(bytes));
        self.wrong += usize::from(read.is_err() || bytes != content(number, FILE_BYTES));
    }
}

/// How often it has gone over its memory: the number after the stressor's name in its metrics.
fn operations(said: &str) -> Option<u64> {
    let mut words = said.split_whitespace().skip_while(|word| *word != "vm");
    words.find_map(|word| word.parse().ok())
}

fn work() -> PathBuf {
    Path::new(AT).join("work")
}

fn file(place: u64) -> PathBuf {
    work().join(place.to_string())
}
