//! Two VMMs in their jails: the guest moves, and each process survives under its filters.
//!
//! A call that a filter lacks ends a process with SIGSYS, and the test with it. The guest checks every word that it counts.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Longest wait for a line; far longer than necessary on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

struct Vmm {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// Lines since the last command. Events of the engine may come before the command's answer.
    since: Vec<String>,
    numbers: Vec<u32>,
    locks: String,
}

impl Vmm {
    fn start(jail: &Path, what: &str, value: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sandboxed-vmm"))
            .arg("--jail")
            .arg(jail)
            .args([what, value])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let (since, numbers) = (Vec::new(), Vec::new());
        let mut vmm = Self { child, input, lines, since, numbers, locks: String::new() };
        vmm.locks = vmm.line(|line| line.strip_prefix("locked by ").map(str::to_owned));
        vmm
    }

    /// Returns what `of` takes from a line since the last command, and keeps the guest's numbers.
    #[track_caller]
    fn line<T>(&mut self, of: impl Fn(&str) -> Option<T>) -> T {
        if let Some(found) = self.since.iter().find_map(|line| of(line)) {
            return found;
        }
        loop {
            let line = self.next_line();
            let found = of(&line);
            self.since.push(line);
            if let Some(found) = found {
                return found;
            }
        }
    }

    #[track_caller]
    fn next_line(&mut self) -> String {
        let Ok(line) = self.lines.recv_timeout(PATIENCE) else {
            panic!("no such line; the process ended with {:?}: {:?}", self.child.try_wait(), self.since);
        };
        self.numbers.extend(line.strip_prefix("guest: ").map(|number| number.parse::<u32>().unwrap()));
        line
    }

    #[track_caller]
    fn ask(&mut self, command: &str) -> String {
        self.since.clear();
        writeln!(self.input, "{command}").unwrap();
        self.line(|line| (line.starts_with("ok") || line.starts_with("error:")).then(|| line.to_owned()))
    }

    #[track_caller]
    fn wait_for(&mut self, event: &str) {
        self.line(|line| line.contains(event).then_some(()));
    }

    #[track_caller]
    fn wait_for_numbers(&mut self, count: usize) {
        let until = self.numbers.len() + count;
        while self.numbers.len() < until {
            let line = self.next_line();
            self.since.push(line);
        }
    }

    #[track_caller]
    fn quit(&mut self) {
        writeln!(self.input, "quit").unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.numbers.extend(line.strip_prefix("guest: ").map(|number| number.parse::<u32>().unwrap()));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The directory that is the root of the processes. Listening sockets are made outside and inherited.
struct Jail(tempfile::TempDir);

impl Jail {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A destination that inherits a listening socket with this name.
    fn destination(&self, name: &str) -> Vmm {
        let path = self.path().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        rustix::io::fcntl_setfd(listener.as_fd(), rustix::io::FdFlags::empty()).unwrap();
        Vmm::start(self.path(), "--listen", &format!("fd:{}", listener.as_raw_fd()))
    }

    /// The address of that socket, for a process in the jail.
    fn address(&self, name: &str, vmm: &Vmm) -> String {
        let root = if vmm.locks.contains("chroot") { Path::new("/") } else { self.path() };
        format!("unix:{}", root.join(name).display())
    }
}

fn kvm_or_skip(test: &str) -> bool {
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    kvm.inspect_err(|error| eprintln!("SKIPPED {test}: /dev/kvm: {error}")).is_ok()
}

#[track_caller]
fn assert_unbroken(parts: &[&[u32]]) {
    let printed = parts.concat();
    assert!(printed.iter().copied().eq(1..=printed.len() as u32), "{parts:?}");
}

#[test]
fn guest_moves_between_jails_into_a_machine_that_its_configuration_describes() {
    if !kvm_or_skip("guest_moves_between_jails_into_a_machine_that_its_configuration_describes") {
        return;
    }
    let jail = Jail::new();
    let mut source = Vmm::start(jail.path(), "--boot", "24");
    let mut destination = jail.destination("first");
    assert!(destination.ask("status").contains("memory 0 running false"), "it has no machine yet");
    source.wait_for_numbers(5);
    if source.locks.contains("chroot") {
        assert!(source.locks.contains("user"), "{}", source.locks);
    } else {
        eprintln!("SKIPPED chroot and user: this needs root");
    }

    let to = jail.address("first", &source);
    assert!(source.ask(&format!("migrate {to}")).starts_with("ok"));
    source.wait_for("outgoing: Status(Completed)");
    destination.wait_for("incoming: Status(Completed)");
    destination.wait_for_numbers(5);

    let status = destination.ask("status");
    assert!(status.contains("memory 24 running true"), "{status}");
    assert!(source.ask("status").contains("running false"));
    source.quit();
    destination.quit();
    assert_unbroken(&[&source.numbers, &destination.numbers]);
}

#[test]
fn cancelled_migration_leaves_the_guest_running_in_its_jail() {
    if !kvm_or_skip("cancelled_migration_leaves_the_guest_running_in_its_jail") {
        return;
    }
    let jail = Jail::new();
    let mut source = Vmm::start(jail.path(), "--boot", "24");
    let mut destination = jail.destination("first");
    source.ask("limit 65536");
    let to = jail.address("first", &source);

    source.ask(&format!("migrate {to}"));
    source.wait_for("outgoing: Status(Active)");
    source.ask("cancel");
    source.wait_for("outgoing: Status(Cancelled)");
    destination.wait_for("incoming: Status(Failed)");
    source.wait_for_numbers(3);

    assert!(source.ask("status").contains("running true"));
    source.quit();
    destination.quit();
    assert_unbroken(&[&source.numbers]);
    assert!(destination.numbers.is_empty());
}

#[test]
fn guest_moves_after_a_cancelled_migration() {
    if !kvm_or_skip("guest_moves_after_a_cancelled_migration") {
        return;
    }
    let jail = Jail::new();
    let mut source = Vmm::start(jail.path(), "--boot", "24");
    let mut first = jail.destination("first");
    source.ask("limit 65536");
    source.ask(&format!("migrate {}", jail.address("first", &source)));
    source.wait_for("outgoing: Status(Active)");
    source.ask("cancel");
    source.wait_for("outgoing: Status(Cancelled)");
    first.wait_for("incoming: Status(Failed)");
    first.quit();

    let mut second = jail.destination("second");
    source.ask("limit 0");
    source.ask(&format!("migrate {}", jail.address("second", &source)));
    source.wait_for("outgoing: Status(");
    source.wait_for("outgoing: Status(Completed)");
    second.wait_for("incoming: Status(Completed)");
    second.wait_for_numbers(5);
    source.quit();
    second.quit();
    assert_unbroken(&[&source.numbers, &second.numbers]);
}

#[test]
fn modules_that_name_the_engine_have_at_most_500_lines() {
    let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let lines: Vec<_> =
        texts.filter(|text| text.contains("sterna::")).map(|text| text.lines().count()).collect();

    assert!(lines.len() >= 3 && lines.iter().sum::<usize>() <= 500, "{lines:?}");
}

#[test]
fn code_of_the_page_stands_in_the_example() {
    let page = include_str!("../../../docs/sandboxes.md");
    let filters = lines(include_str!("../src/filters.rs"));
    let blocks: Vec<_> =
        page.split("```rust\n").skip(1).map(|rest| lines(rest.split("```").next().unwrap())).collect();

    assert!(!blocks.is_empty());
    for block in blocks {
        assert!(filters.windows(block.len()).any(|window| window == block), "not in filters.rs: {block:#?}");
    }
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}
