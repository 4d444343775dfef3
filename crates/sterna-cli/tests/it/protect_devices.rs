//! Protection of a guest with a network card and a disk, from outside: its packets, its console and its disk, and the guest's own look at
//! what it wrote. The guest is the ledger of `sterna-guests`; the two VMs and their taps are in a network of their own.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_guests::ledger;
use sterna_qmp::Endpoint;
use sterna_qmp::drive::Vm;

const PATIENCE: Duration = Duration::from_secs(60);

/// Says why a test cannot run here.
#[allow(clippy::print_stderr, reason = "says what was skipped")]
fn skip(test: &str, why: impl std::fmt::Display) {
    eprintln!("SKIPPED {test}: {why}");
}

/// Runs `test` on a thread with a network of its own, in which it and its children are.
pub fn in_own_network(name: &str, test: impl FnOnce() + Send + 'static) {
    for device in ["/dev/kvm", "/dev/net/tun"] {
        if let Err(error) = File::options().read(true).write(true).open(device) {
            return skip(name, format!("{device}: {error}"));
        }
    }
    let name = name.to_owned();
    let thread = std::thread::spawn(move || {
        // SAFETY: it changes the network of this thread alone.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return skip(&name, format!("no network of its own: {}", std::io::Error::last_os_error()));
        }
        test();
    });
    thread.join().expect("the test");
}

/// Hears every packet of this network, whatever interface brings it.
pub struct Ear(File);

impl Ear {
    pub fn new() -> Self {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: it makes a descriptor, or none.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, all) };
        assert!(socket >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let bytes: libc::c_int = 64 << 20;
        let (level, size) = (libc::SOL_SOCKET, size_of_val(&bytes) as u32);
        // SAFETY: the descriptor is open, and the kernel reads one int.
        unsafe {
            libc::setsockopt(socket.as_raw_fd(), level, libc::SO_RCVBUFFORCE, (&raw const bytes).cast(), size)
        };
        Self(socket.into())
    }

    /// What has come since the last time: numbers of the guest's packets, and how many announcements.
    pub fn heard(&mut self) -> (Vec<u64>, usize) {
        let (mut numbers, mut announcements) = (Vec::new(), 0);
        let mut packet = [0; 2048];
        while let Ok(length) = self.0.read(&mut packet) {
            numbers.extend(ledger::number_of_packet(&packet[..length]));
            announcements += usize::from(packet[12..14] == [0x80, 0x35]);
        }
        (numbers, announcements)
    }
}

struct Pair {
    directory: tempfile::TempDir,
    primary: Child,
    standby: Child,
    protects: Child,
    ear: Ear,
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in [&mut self.protects, &mut self.primary, &mut self.standby] {
            // Both fail if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn sterna() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
}

fn run(at: &Path, side: &str, more: &[&str]) -> Child {
    let disk = at.join(format!("{side}.img"));
    File::create(&disk).unwrap().set_len(ledger::DISK_BYTES).unwrap();
    let child = sterna()
        .args(["run", "--machine=kvm", "--ram=64M", "--lease=2s"])
        .arg(format!("--guest=flat:{}", at.join("ledger").display()))
        .arg(format!("--disk={},migrate=copy", disk.display()))
        .arg(format!("--net=tap:{side}"))
        .arg(format!("--serial={}", at.join(format!("{side}.out")).display()))
        .arg(format!("--qmp=unix:{}", at.join(format!("{side}.qmp")).display()))
        .arg(format!("--arbiter=file:{}", at.join("arbiter").display()))
        .arg(format!("--exit-with-parent={}", std::process::id()))
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(at.join(format!("{side}.err"))).unwrap())
        .spawn()
        .unwrap();
    wait("the monitor", || connect(&at.join(format!("{side}.qmp"))).is_some());
    let is_up = Command::new("ip").args(["link", "set", "dev", side, "up"]).status().unwrap();
    assert!(is_up.success());
    child
}

/// `sterna protect`, from one side to another.
fn protect(at: &Path, from: &str, to: &str, more: &[&str]) -> Command {
    let mut command = sterna();
    command
        .arg("protect")
        .arg(at.join(format!("{from}.qmp")))
        .arg(format!("unix:{}", at.join(format!("to-{to}")).display()))
        .arg("--standby-qmp")
        .arg(at.join(format!("{to}.qmp")))
        .arg("--json")
        .stdout(Stdio::null())
        .stderr(File::create(at.join("protect.err")).unwrap());
    let has_delay = more.iter().any(|option| option.starts_with("--checkpoint-delay"));
    command.args(more).args((!has_delay).then_some("--checkpoint-delay=20"));
    command
}

pub fn connect(socket: &Path) -> Option<Vm> {
    Vm::connect(&Endpoint::Unix(socket.to_owned())).ok()
}

pub fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Pair {
    fn new(more: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        std::fs::create_dir(at.join("arbiter")).unwrap();
        std::fs::write(at.join("ledger"), ledger::image()).unwrap();
        let ear = Ear::new();
        // Stopped, so that every packet is heard.
        let primary = run(at, "a", &["-S"]);
        let standby = run(at, "b", &["--incoming=defer"]);
        let _ = connect(&at.join("a.qmp")).unwrap().execute("cont", Value::Null).unwrap();
        let protects = protect(at, "a", "b", more).spawn().unwrap();
        let pair = Self { directory, primary, standby, protects, ear };
        pair.await_checkpoints(10);
        pair
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn ask(&self, side: &str, command: &str) -> Value {
        connect(&self.path(&format!("{side}.qmp"))).unwrap().execute(command, Value::Null).unwrap()
    }

    fn checkpoints(&self, side: &str) -> u64 {
        self.ask(side, "x-sterna-query-protection")["checkpoints"].as_u64().unwrap_or(0)
    }

    /// The standby holds so many more.
    fn await_checkpoints(&self, more: u64) {
        let before = self.checkpoints("b");
        let begin = Instant::now();
        while self.checkpoints("b") < before + more {
            let said = || std::fs::read_to_string(self.path("protect.err")).unwrap_or_default();
            assert!(begin.elapsed() < PATIENCE, "checkpoints did not come: {}", said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_running(&self, side: &str) -> bool {
        self.ask(side, "query-status")["running"] == true
    }

    fn disk(&self, side: &str) -> Vec<u8> {
        std::fs::read(self.path(&format!("{side}.img"))).unwrap()
    }

    /// The numbers that the guest has printed there, in whole lines.
    fn lines(&self, side: &str) -> Vec<u64> {
        let text = std::fs::read_to_string(self.path(&format!("{side}.out"))).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        // A survivor may begin within a line.
        let whole = whole.lines().skip_while(|line| line.len() < 16);
        whole.map(|line| u64::from_str_radix(line, 16).expect("a number")).collect()
    }
}

#[test]
fn guest_with_a_disk_and_a_card_goes_on_where_its_last_checkpoint_was() {
    in_own_network("guest_with_a_disk_and_a_card_goes_on_where_its_last_checkpoint_was", || {
        for more in [&[][..], &["--channels=2"]] {
            let mut pair = Pair::new(more);
            let seen_before = pair.lines("a").len();
            pair.await_checkpoints(20);

            pair.primary.kill().unwrap();
            pair.primary.wait().unwrap();
            let (before, _) = pair.ear.heard();
            let said = pair.lines("a");
            wait("the survivor", || pair.is_running("b"));
            // It writes over its whole disk, and reads before that what it had written.
            let first = ledger::SLOTS as usize * 3;
            wait("the guest", || pair.lines("b").len() > first);
            let _ = pair.ask("b", "stop");
            let (after, announcements) = pair.ear.heard();

            assert!(said.len() > seen_before && before.len() > 3, "{} {}", said.len(), before.len());
            // Nobody has heard more than what goes on, and no packet twice.
            let all: Vec<_> = before.iter().chain(&after).copied().collect();
            assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{:?} {:?}", before.last(), after.first());
            assert!(announcements >= 1, "the card says where it is");
            // It goes on with a line that follows, or with some that may have been heard before.
            let lines = pair.lines("b");
            assert!(lines[0] <= said.last().unwrap() + 2, "{} after {:?}", lines[0], said.last());
            assert!(lines.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            // Its disk is of the same moment as itself: the guest has looked, and so do we.
            let last = ledger::last_on_disk(&pair.disk("b")).unwrap();
            let printed = *lines.last().unwrap();
            assert!((printed..=printed + 2).contains(&last), "{last} on the disk, {printed} printed");
        }
    });
}

#[test]
fn disk_of_the_standby_is_that_of_the_last_checkpoint() {
    in_own_network("disk_of_the_standby_is_that_of_the_last_checkpoint", || {
        let mut pair = Pair::new(&[]);
        pair.await_checkpoints(10);
        wait("a whole disk", || pair.lines("a").last().is_some_and(|number| *number > ledger::SLOTS + 2));
        let _ = pair.ask("a", "stop");
        // Two more: one may have been taken before.
        pair.await_checkpoints(3);
        let here = pair.disk("a");
        wait("the same disk", || pair.disk("b") == here);
        let last = ledger::last_on_disk(&here).unwrap();
        assert!(last > ledger::SLOTS);

        // What the primary's disk gets behind the standby's back never comes there.
        pair.primary.kill().unwrap();
        wait("the end", || pair.ask("b", "query-migrate")["status"] == "completed");
        assert_eq!(pair.ask("b", "query-status")["status"], json!("paused"));
        assert!(pair.disk("b") == here);
        let _ = pair.ask("b", "cont");
        wait("the guest", || pair.lines("b").last().is_some_and(|number| *number > last + 2 * ledger::SLOTS));
    });
}

#[test]
fn planned_takeover_loses_no_packet_and_leaves_one_disk() {
    in_own_network("planned_takeover_loses_no_packet_and_leaves_one_disk", || {
        let mut pair = Pair::new(&[]);
        let taken = sterna().arg("takeover").arg(pair.path("b.qmp")).arg("--planned").output().unwrap();
        assert!(taken.status.success(), "{taken:?}");
        wait("the guest", || pair.is_running("b"));
        let last = *pair.lines("a").last().unwrap();
        wait("more", || pair.lines("b").last().is_some_and(|number| *number > last + 200));
        let _ = pair.ask("b", "stop");
        let (heard, _) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
        let (lines, last) = (pair.lines("b"), ledger::last_on_disk(&pair.disk("b")).unwrap());
        assert!((0..=2).contains(&(last - lines.last().unwrap())));
    });
}

#[test]
fn guest_whose_standby_is_killed_goes_on_with_everything_it_has_said() {
    in_own_network("guest_whose_standby_is_killed_goes_on_with_everything_it_has_said", || {
        let mut pair = Pair::new(&[]);
        pair.standby.kill().unwrap();
        wait("its end", || pair.ask("a", "query-migrate")["status"] != "colo");
        let last = *pair.lines("a").last().unwrap();
        wait("the guest", || pair.lines("a").last().is_some_and(|number| *number > last + 200));
        let _ = pair.ask("a", "stop");
        let (heard, _) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
        assert_eq!(heard[0], 1);
        ledger::last_on_disk(&pair.disk("a")).unwrap();
        // The disk is nobody's copy any more.
        let grown = connect(&pair.path("a.qmp"))
            .unwrap()
            .execute("block_resize", json!({"device": "virtio0", "size": 2 * ledger::DISK_BYTES}));
        assert!(!format!("{grown:?}").contains("copied"), "{grown:?}");
    });
}

#[test]
fn guest_whose_devices_cannot_be_held_is_refused_by_name_and_runs_on() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return skip("guest_whose_devices_cannot_be_held_is_refused_by_name_and_runs_on", error);
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let disk = at.join("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let cases = [
        ("shared", "migrate=shared", Some("both sides see the disk")),
        ("none", "migrate=none", Some("does not travel with checkpoints: use migrate=copy, or read-only=on")),
        ("read-only", "migrate=none,read-only=on", None),
        ("copy", "migrate=copy", None),
    ];
    for (name, options, says) in cases {
        let socket = at.join(name);
        let mut vm = sterna()
            .args(["run", "--machine=kvm", "--ram=64M", "--rate=10"])
            .arg(format!("--disk={},{options}", disk.display()))
            .arg(format!("--qmp=unix:{}", socket.display()))
            .arg(format!("--exit-with-parent={}", std::process::id()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait("the monitor", || connect(&socket).is_some());
        let nobody = format!("unix:{}", at.join("nobody").display());
        let refused = sterna().arg("protect").arg(&socket).arg(&nobody).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        match says {
            Some(why) => assert!(said.contains(why) && said.contains(disk.to_str().unwrap()), "{said}"),
            None => assert!(!said.contains("cannot be protected"), "{said}"),
        }
        assert_eq!(connect(&socket).unwrap().run_state().unwrap(), "running");
        let _ = vm.kill();
        let _ = vm.wait();
    }
}

#[test]
fn standby_whose_devices_differ_is_refused_while_the_guest_runs_on() {
    in_own_network("standby_whose_devices_differ_is_refused_while_the_guest_runs_on", || {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        std::fs::create_dir(at.join("arbiter")).unwrap();
        std::fs::write(at.join("ledger"), ledger::image()).unwrap();
        let mut primary = run(at, "a", &[]);
        // Its name gives its card another address.
        let mut standby = run(at, "b", &["--incoming=defer", "--name=other"]);
        let refused = protect(at, "a", "b", &[]).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let mut here = connect(&at.join("a.qmp")).unwrap();
        assert_eq!(here.run_state().unwrap(), "running");
        let mut there = connect(&at.join("b.qmp")).unwrap();
        let why = there.execute("query-migrate", Value::Null).unwrap();
        assert!(why.to_string().contains("network card 0"), "{why}");
        for vm in [&mut primary, &mut standby] {
            let _ = vm.kill();
            let _ = vm.wait();
        }
    });
}

#[test]
fn disk_at_its_limit_goes_on_with_the_checkpoints_that_it_asks_for() {
    in_own_network("disk_at_its_limit_goes_on_with_the_checkpoints_that_it_asks_for", || {
        // No checkpoint is due for an hour, and one block is as much as an epoch takes.
        let mut pair =
            Pair::new(&["--checkpoint-delay=3600000", "--set=x-sterna-checkpoint-buffer-size=65536"]);
        let last = *pair.lines("a").last().unwrap_or(&0);
        wait("the guest", || pair.lines("a").last().is_some_and(|number| *number > last + 50));
        pair.primary.kill().unwrap();
        wait("the survivor", || pair.is_running("b"));
        wait("the guest", || pair.lines("b").len() > 2 * ledger::SLOTS as usize);
        let _ = pair.ask("b", "stop");
        ledger::last_on_disk(&pair.disk("b")).unwrap();
    });
}

#[test]
fn survivor_is_protected_again_with_its_disk_and_its_card() {
    in_own_network("survivor_is_protected_again_with_its_disk_and_its_card", || {
        let mut pair = Pair::new(&[]);
        pair.primary.kill().unwrap();
        pair.primary.wait().unwrap();
        wait("the survivor", || pair.is_running("b"));
        pair.protects.wait().unwrap();
        // The restored host: its disk has what nobody has heard of.
        pair.primary = run(pair.directory.path(), "a", &["--incoming=defer"]);
        std::fs::write(pair.path("a.img"), vec![9; ledger::DISK_BYTES as usize]).unwrap();
        pair.protects = protect(pair.directory.path(), "b", "a", &[]).spawn().unwrap();
        wait("checkpoints", || {
            pair.ask("a", "x-sterna-query-protection")["checkpoints"].as_u64() >= Some(20)
        });
        pair.standby.kill().unwrap();
        wait("the second survivor", || pair.is_running("a"));
        wait("the guest", || pair.lines("a").len() > 2 * ledger::SLOTS as usize);
        let _ = pair.ask("a", "stop");
        ledger::last_on_disk(&pair.disk("a")).unwrap();
        let (heard, _) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] < pair[1]));
    });
}
