//! The guest's work in a root of Debian packages: it writes, syncs and reads files, and runs stress-ng.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::mount::{MountFlags, UnmountFlags, unmount};

use super::content;
use crate::lab::mount;

/// Mount point of the root.
const AT: &str = "/root";
/// Number of files that are written in turn.
const FILES: u64 = 16;
const FILE_BYTES: usize = 96 << 10;
/// Alignment of reads that bypass the cache.
const ALIGNMENT: usize = 4096;
/// The program that continuously writes memory and checks its content.
const STRESS: [&str; 9] = [
    "stress-ng",
    "--vm=1",
    "--vm-method=rand-set",
    "--vm-keep",
    "--verify",
    "--timeout=0",
    "--temp-path=/tmp",
    "--no-rand-seed",
    "--metrics-brief",
];
/// The memory that it writes, and that it writes in a brief guest ([`super::BRIEF`]).
const STRESS_BYTES: [&str; 2] = ["--vm-bytes=16m", "--vm-bytes=4m"];
/// Output of stress-ng if it has found no fault.
const NO_FAULT: &str = "failed: 0";

/// The running work in the root.
pub(super) struct Root {
    stress: Child,
    /// Number of the step that last wrote each file; 0: none.
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

/// Mounts the root on this disk. Ends the guest if it does not exist.
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
    /// Mounts the root and starts the work.
    pub(super) fn begin(device: &str, is_brief: bool) -> Self {
        open(device);
        let bytes = STRESS_BYTES[usize::from(is_brief)];
        let stress = command(&STRESS).arg(bytes).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let stress = stress.unwrap_or_else(|error| panic!("stress-ng: {error}"));
        Self { stress, written: vec![0; FILES as usize], wrong: 0 }
    }

    /// Replaces a file with a new one, syncs it, and reads another one.
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

    /// Reads all files again, ends all programs, and unmounts the disk. Returns the number of wrong files,
    /// and the reason if stress-ng found a fault or ended by itself.
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
        // SIGINT, as Ctrl-C sends it, makes stress-ng check its memory once more.
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
        // Without readable output, there is nothing to report.
        let _ = self.stress.stdout.take().map(|mut output| output.read_to_string(&mut text));
        let _ = self.stress.stderr.take().map(|mut output| output.read_to_string(&mut text));
        text.replace('\n', "; ")
    }

    /// Reads a file without the cache and checks it.
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

/// Number of passes over the memory: the number after the stressor's name in the metrics.
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
