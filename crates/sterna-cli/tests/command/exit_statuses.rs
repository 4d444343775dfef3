//! One rule for the exit statuses of all commands (docs/cli.md, *Exit statuses*).
//!
//! Status 2 with `usage:` in the message is for a command line that makes no sense. Status 2 is also for a
//! file on it that cannot be read or has the wrong content. Status 1 is for an operation that was tried and
//! failed.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, Mode, mkfifoat};
use tempfile::TempDir;

use crate::peer::image;
use crate::save::Process;

/// The expected end of a command line: its status, and whether Sterna or the parser reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Comes {
    /// Status 2 and `sterna: usage:`
    Usage,
    /// Status 2 and `sterna: error:`, because of a file
    File,
    /// Status 1 and `sterna: error:`
    Failed,
    /// Status 2 and the parser's own message
    Parser,
    /// Status 1 without an error: the images are damaged or differ
    Verdict,
}
use Comes::{Failed, File, Parser, Usage, Verdict};

/// Files and sockets of every kind, by name.
struct World {
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::create_dir(world.path("directory")).unwrap();
        mkfifoat(CWD, world.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        std::fs::write(world.path("empty"), "").unwrap();
        std::fs::write(world.path("garbage"), "no image, no record and no certificate\n").unwrap();
        image(&world.path("whole"));
        let mut bytes = std::fs::read(world.path("whole")).unwrap();
        // Changes the version of the stream.
        bytes[7] = 9;
        std::fs::write(world.path("broken"), bytes).unwrap();
        let mut bytes = std::fs::read(world.path("whole")).unwrap();
        // A VM description begins after EOF, and is cut off.
        bytes.extend(b"\x06\0\0\0\x40{");
        std::fs::write(world.path("damaged"), bytes).unwrap();
        let listener = UnixListener::bind(world.path("talker")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = stream.unwrap().write_all(b"220 a mail server, perhaps\r\n");
            }
        });
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        match name {
            // Its owner may open it, but reading its first byte fails, even for root.
            "unreadable" => "/proc/self/mem".into(),
            name => self.directory.path().join(name),
        }
    }

    /// Runs a command line. `@NAME` is replaced by the file with that name; tests replace KIND by each kind
    /// of file.
    fn run(&self, line: &str) -> Output {
        let words = line.split_whitespace().map(|word| match word.split_once('@') {
            Some((before, name)) => format!("{before}{}", self.path(name).display()),
            None => word.to_owned(),
        });
        let mut command = Command::new("timeout");
        command.args(["60", env!("CARGO_BIN_EXE_sterna")]).args(words).stdin(Stdio::null());
        command.env("NO_COLOR", "1").output().unwrap()
    }

    fn check(&self, line: &str, comes: Comes) {
        let output = self.run(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (status, head) = match comes {
            Usage => (2, "sterna: usage: "),
            File => (2, "sterna: error: "),
            Failed => (1, "sterna: error: "),
            Parser => (2, "error: "),
            Verdict => (1, ""),
        };
        assert_eq!(output.status.code(), Some(status), "sterna {line}: {said}");
        assert!(said.lines().any(|line| line.starts_with(head)) || head.is_empty(), "sterna {line}: {said}");
        assert_eq!(said.contains("usage: "), comes == Usage, "sterna {line}: {said}");
    }
}

const COMMANDS: [&str; 20] = [
    "demo",
    "run",
    "migrate",
    "plan",
    "info",
    "cancel",
    "decide",
    "verify",
    "inspect",
    "convert",
    "save",
    "restore",
    "serve",
    "extract",
    "diff",
    "repair",
    "bench",
    "report",
    "protect",
    "unprotect",
];

#[test]
fn unknown_options_are_usage_errors_of_every_command() {
    let world = World::new();
    for command in COMMANDS {
        world.check(&format!("{command} --no-such-option"), Parser);
    }
    world.check("no-such-command", Parser);
}

#[test]
fn files_that_cannot_be_read_or_are_something_else_are_named_with_status_2() {
    let world = World::new();
    let lines = [
        "verify @KIND",
        "inspect @KIND",
        "convert @KIND @made",
        "extract @KIND @made",
        "diff @KIND @whole",
        "diff @whole @KIND",
        "repair @KIND -o @made",
        "restore @KIND send:tcp:127.0.0.1:1",
        "restore @KIND -- true",
        "report @KIND",
    ];
    for line in lines {
        for kind in ["missing", "directory", "fifo", "unreadable", "empty", "garbage", "broken"] {
            let comes = match (line, kind) {
                // The image is damaged, which is the result of `verify`.
                ("verify @KIND", "empty" | "broken") => Verdict,
                // These commands read pipes.
                ("convert @KIND @made" | "report @KIND", "fifo") => continue,
                _ => File,
            };
            world.check(&line.replace("KIND", kind), comes);
            assert!(!world.path("made").exists(), "{line} {kind}");
        }
    }
    world.check("convert @whole @made --format libvirt-raw --xml @missing", File);
    world.check("save @nowhere @made --format libvirt-raw --xml @missing", File);
    world.check("run --machine=process --ram=16M --tls-dir @missing", File);
    world.check("save listen:tcp:127.0.0.1:0 @made --tls-dir @missing", File);
}

#[test]
fn what_cannot_be_written_fails_and_what_is_there_already_needs_force() {
    let world = World::new();
    for command in ["convert @whole", "extract @whole"] {
        world.check(&format!("{command} @directory/missing/made"), Failed);
        world.check(&format!("{command} @garbage"), Usage);
        world.check(&format!("{command} @directory"), Usage);
    }
    world.check("save listen:tcp:127.0.0.1:0 @garbage", Usage);
    world.check("inspect @whole --svg @directory/missing/made", Failed);
    world.check("inspect @whole --svg @whole", Usage);
    world.check("extract @whole @made --block no-such-block", Usage);
    world.check("repair @whole -o @made", File);
    world.check("restore @whole send:tcp:127.0.0.1:1", Failed);
    world.check("restore @whole send:nonsense", Usage);
    world.check("restore @whole send:rdma:127.0.0.1:4444", Usage);
    world.check("save listen:rdma:127.0.0.1:4444 @made", Usage);
    world.check("run --machine=process --ram=16M --incoming rdma:127.0.0.1", Usage);
    world.check("standby listen:tcp:127.0.0.1:99999 --image @made", Usage);
    world.check("standby listen:tcp:127.0.0.1:0 --image @made", Usage);
    world.check("standby listen:tcp:::1:0 --image @made --insecure --disk vda=@disk,size=1M", Usage);
    assert!(!world.path("disk").exists(), "a file was made for an address that does not do");
    world.check("run --machine=process --ram=16M --incoming rdma:127.0.0.1:4444", Failed);
    world.check("restore @whole @nowhere --force-damaged", Usage);
    world.check("restore @damaged send:tcp:127.0.0.1:1", File);
    world.check("restore @damaged send:tcp:127.0.0.1:1 --force-damaged", Failed);
    world.check("convert @damaged @made", File);
    world.check("save listen:nonsense @made", Usage);
    world.check("save listen:tcp:127.0.0.1:0 @made --cap bogus", Usage);
    world.check("save listen:tcp:127.0.0.1:0 @made --set bogus=1", Usage);
    world.check("save listen:tcp:127.0.0.1:0 @made --set multifd-channels=0", Usage);
    world.check("save listen:tcp:127.0.0.1:0 @made --format qcow2", Usage);
    world.check("restore @whole send:tcp:127.0.0.1:1 --cap bogus", Usage);
    world.check("run --machine=process --ram=16M --incoming nonsense", Usage);
    world.check("run --machine=process --ram=16M --incoming fd:99", Usage);
    world.check("restore @whole send:fd:99", Usage);
    world.check("run --machine=process --ram=16M --incoming defer", Usage);
    world.check("run --ram=lots", Parser);
    world.check("run --machine=process --ram=16M --kernel @garbage", Usage);
    world.check("run --kernel @garbage --guest tide", Parser);
    world.check("run --initrd @garbage", Parser);
    world.check("run --append console=ttyS0", Parser);
    world.check("plan", Usage);
    world.check("demo --forecast", Usage);
}

#[test]
fn sockets_without_a_monitor_are_failures() {
    let world = World::new();
    for line in [
        "info @KIND",
        "cancel @KIND",
        "decide @KIND source",
        "unprotect @KIND",
        "protect @KIND tcp:127.0.0.1:1 --arbiter=file:@directory",
        "plan @KIND",
        "migrate @KIND tcp:127.0.0.1:1",
        "save @KIND @made",
        "restore @whole @KIND",
    ] {
        for kind in ["missing", "directory", "fifo", "garbage", "talker"] {
            world.check(&line.replace("KIND", kind), Failed);
        }
    }
}

#[test]
fn settings_that_a_vm_does_not_know_are_usage_errors() {
    let world = World::new();
    let vm = Process::start(world.path("vm"), &[]);

    for (line, comes) in [
        ("migrate @vm tcp:127.0.0.1:1 --cap bogus", Usage),
        ("migrate @vm tcp:127.0.0.1:1 --set bogus=1", Usage),
        ("migrate @vm tcp:127.0.0.1:1 --set max-bandwidth=fast", Usage),
        ("migrate @vm tcp:127.0.0.1:1 --set multifd-channels=0", Usage),
        ("migrate @vm tcp:127.0.0.1:1 --set novalue", Parser),
        ("migrate @vm nonsense", Parser),
        ("migrate @vm rdma:host", Parser),
        ("migrate @vm rdma::4444", Parser),
        ("migrate @vm rdma:host:4444 --set x-rdma-chunk-size=3M", Usage),
        ("migrate @vm rdma:host:4444 --set x-sterna-rdma-pinned-limit=1K", Usage),
        ("migrate @vm tcp:127.0.0.1:1 --paused", Parser),
        ("migrate @vm tcp:127.0.0.1:1 --tls-dir @missing", File),
        ("migrate @vm tcp:127.0.0.1:1", Failed),
        ("save @vm @garbage", Usage),
        ("save @vm @directory", Usage),
        ("save @vm @made --format qcow2", Usage),
        ("save @vm @made --format libvirt-raw", Usage),
        ("save @vm @made --cap multifd", Usage),
        ("save @vm @directory/missing/made", Failed),
        ("restore @whole @vm", Failed),
        ("cancel @vm", Failed),
        ("decide @vm source", Failed),
        ("decide @vm nobody", Parser),
        ("protect @vm tcp://127.0.0.1:1 --arbiter=file:@directory", Parser),
        ("protect @vm tcp:127.0.0.1:1 --contact=tcp:::1:1 --arbiter=file:@directory", Parser),
        ("protect @vm tcp:127.0.0.1:1 --arbiter=nonsense", Parser),
        ("protect @vm tcp:127.0.0.1:1 --arbiter=file:@directory --checkpoint-delay=0", Parser),
        ("unprotect @vm", Failed),
    ] {
        world.check(line, comes);
        assert_eq!(vm.vm().run_state().unwrap(), "running", "{line}");
    }
}

#[test]
fn output_that_cannot_be_written_is_no_success_where_it_is_the_result() {
    let world = World::new();
    for (line, status) in [
        ("inspect @whole", 1),
        ("inspect @whole --json", 1),
        ("plan --bandwidth 10GB/s --dirty-rate 1GB/s --sync 1ms", 1),
        // 1 would mean that the images are damaged or differ.
        ("verify @whole", 2),
        ("diff @whole @whole", 2),
        // The result of this command is the file.
        ("extract @whole @made --partial --arch x86-64 --at m0=0 --json", 0),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let words = line.split_whitespace().map(|word| match word.split_once('@') {
            Some((before, name)) => format!("{before}{}", world.path(name).display()),
            None => word.to_owned(),
        });

        let output = Command::new(env!("CARGO_BIN_EXE_sterna")).args(words).stdout(full).output().unwrap();

        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "sterna {line}: {said}");
        assert!(said.contains("cannot write to standard output"), "sterna {line}: {said}");
    }
}

#[test]
fn reader_that_has_seen_enough_is_no_failure() {
    let world = World::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut inspect = Command::new(env!("CARGO_BIN_EXE_sterna"));

    let output = inspect.arg("inspect").arg(world.path("whole")).stdout(writer).output().unwrap();

    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn monitor_that_another_client_holds_is_called_so() {
    let world = World::new();
    // Like a QEMU's monitor while another client is connected: the connection waits in the queue.
    let _listener = UnixListener::bind(world.path("busy")).unwrap();
    for line in ["info @busy", "cancel @busy", "migrate @busy tcp:127.0.0.1:1"] {
        let output = world.run(line);

        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("another client") && said.contains("second `-qmp"), "{line}: {said}");
    }
}
