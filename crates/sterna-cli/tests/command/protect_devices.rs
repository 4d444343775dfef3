//! Protection of a guest with a network card and a disk.
//!
//! The test observes packets, console and disk from outside, and the guest checks its own writes. The guest
//! is the ledger of `sterna-guests`. The two VMs and their taps are in their own network namespace.

use std::fs::File;
use std::io::Read;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use serde_json::json;
use sterna_guests::ledger;

use crate::support::protection::{Process, Site, command, connect, wait};

/// Prints why a test cannot run here.
#[allow(clippy::print_stderr, reason = "says what was skipped")]
pub fn skip(test: &str, why: impl std::fmt::Display) {
    eprintln!("SKIPPED {test}: {why}");
}

/// Runs `test` on a thread with its own network namespace, which its child processes inherit.
pub fn in_own_network(name: &str, test: impl FnOnce() + Send + 'static) {
    for device in ["/dev/kvm", "/dev/net/tun"] {
        if let Err(error) = File::options().read(true).write(true).open(device) {
            return skip(name, format!("{device}: {error}"));
        }
    }
    let name = name.to_owned();
    let thread = std::thread::spawn(move || {
        // SAFETY: the call has no pointers, and changes only the network namespace of this thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return skip(&name, format!("no network of its own: {}", std::io::Error::last_os_error()));
        }
        test();
    });
    thread.join().expect("the test");
}

/// Receives every packet in this network namespace, on all interfaces.
pub struct Ear(File);

impl Ear {
    pub fn new() -> Self {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: the call has no pointers; it creates a descriptor or fails.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, all) };
        assert!(socket >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptor was just created and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let bytes: libc::c_int = 64 << 20;
        let (level, size) = (libc::SOL_SOCKET, size_of_val(&bytes) as u32);
        // SAFETY: the descriptor is open, and the kernel reads one int.
        unsafe {
            libc::setsockopt(socket.as_raw_fd(), level, libc::SO_RCVBUFFORCE, (&raw const bytes).cast(), size)
        };
        Self(socket.into())
    }

    /// Packets since the previous call: the numbers of the guest's packets, and the count of announcements.
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
    site: Site,
    primary: Process,
    standby: Process,
    protects: Process,
    ear: Ear,
}

impl Deref for Pair {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

/// Starts the ledger's VM, with a network card and a disk that migrates.
pub fn run(site: &Site, side: &str, more: &[&str]) -> Process {
    let disk = site.path(&format!("{side}.img"));
    File::create(&disk).unwrap().set_len(ledger::DISK_BYTES).unwrap();
    std::fs::write(site.path("ledger"), ledger::image()).unwrap();
    let mut vm = site.vm(side, &site.arbiter());
    vm.args(["--machine=kvm", "--ram=64M", "--lease=2s"])
        .arg(format!("--guest=flat:{}", site.path("ledger").display()))
        .arg(format!("--disk={},migrate=copy", disk.display()))
        .arg(format!("--net=tap:{side}"))
        .arg(format!("--serial={}", site.path(&format!("{side}.out")).display()))
        .args(more);
    let vm = site.start(side, &mut vm);
    let is_up = Command::new("ip").args(["link", "set", "dev", side, "up"]).status().unwrap();
    assert!(is_up.success());
    vm
}

impl Pair {
    fn new(more: &[&str]) -> Self {
        let site = Site::new();
        let ear = Ear::new();
        // The guest starts stopped, so that the test receives every packet.
        let primary = run(&site, "a", &["-S"]);
        let standby = run(&site, "b", &["--incoming=defer"]);
        let _ = site.ask("a", "cont");
        let protects = Process(site.protect("a", "b", more).spawn().unwrap());
        site.await_checkpoints("b", 10);
        Self { site, primary, standby, protects, ear }
    }

    fn disk(&self, side: &str) -> Vec<u8> {
        disk(&self.site, side)
    }

    fn lines(&self, side: &str) -> Vec<u64> {
        lines(&self.site, side)
    }
}

/// The content of that side's disk.
pub fn disk(site: &Site, side: &str) -> Vec<u8> {
    std::fs::read(site.path(&format!("{side}.img"))).unwrap()
}

/// The numbers that the guest has printed at that side, from complete lines.
pub fn lines(site: &Site, side: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(site.path(&format!("{side}.out"))).unwrap();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    // A survivor may start in the middle of a line.
    let whole = whole.lines().skip_while(|line| line.len() < 16);
    whole.map(|line| u64::from_str_radix(line, 16).expect("a number")).collect()
}

#[test]
fn guest_with_a_disk_and_a_card_goes_on_where_its_last_checkpoint_was() {
    in_own_network("guest_with_a_disk_and_a_card_goes_on_where_its_last_checkpoint_was", || {
        for more in [&[][..], &["--channels=2"]] {
            let mut pair = Pair::new(more);
            let seen_before = pair.lines("a").len();
            pair.await_checkpoints("b", 20);

            pair.primary.kill();
            let (before, _) = pair.ear.heard();
            let said = pair.lines("a");
            wait("the survivor", || pair.is_running("b"));
            // The guest rewrites its whole disk, and checks the old content before each write.
            let first = ledger::SLOTS as usize * 3;
            wait("the guest", || pair.lines("b").len() > first);
            let _ = pair.ask("b", "stop");
            let (after, announcements) = pair.ear.heard();

            assert!(said.len() > seen_before && before.len() > 3, "{} {}", said.len(), before.len());
            // No packet was sent twice, and none left that the survivor does not know.
            let all: Vec<_> = before.iter().chain(&after).copied().collect();
            assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{:?} {:?}", before.last(), after.first());
            assert!(announcements >= 1, "the card says where it is");
            // The survivor's first line follows the last one, or repeats some that were already printed.
            let lines = pair.lines("b");
            assert!(lines[0] <= said.last().unwrap() + 2, "{} after {:?}", lines[0], said.last());
            assert!(lines.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            // Disk and guest are of the same moment. The guest has checked this, and the test checks it here.
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
        pair.await_checkpoints("b", 10);
        wait("a whole disk", || pair.lines("a").last().is_some_and(|number| *number > ledger::SLOTS + 2));
        let _ = pair.ask("a", "stop");
        // Two more checkpoints, because one may have been taken before the stop.
        pair.await_checkpoints("b", 3);
        let here = pair.disk("a");
        wait("the same disk", || pair.disk("b") == here);
        let last = ledger::last_on_disk(&here).unwrap();
        assert!(last > ledger::SLOTS);

        // After the primary was killed, the standby's disk stays as it was at the last checkpoint.
        pair.primary.kill();
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
        let taken = command("takeover", &pair.socket("b"), &["--planned"]);
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
        pair.standby.kill();
        wait("its end", || pair.ask("a", "query-migrate")["status"] != "colo");
        let last = *pair.lines("a").last().unwrap();
        wait("the guest", || pair.lines("a").last().is_some_and(|number| *number > last + 200));
        let _ = pair.ask("a", "stop");
        let (heard, _) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
        assert_eq!(heard[0], 1);
        ledger::last_on_disk(&pair.disk("a")).unwrap();
        // The disk is not copied any more, so it can be resized.
        let grown = connect(&pair.socket("a"))
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
    let site = Site::new();
    let disk = site.path("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let cases = [
        ("shared", "migrate=shared", Some("use migrate=copy, with a separate file at each side")),
        ("none", "migrate=none", Some("are not part of the checkpoints: use migrate=copy or read-only=on")),
        ("read-only", "migrate=none,read-only=on", None),
        ("copy", "migrate=copy", None),
    ];
    for (name, options, says) in cases {
        let mut vm = site.vm(name, &site.arbiter());
        vm.args(["--machine=kvm", "--ram=64M", "--rate=10"]);
        let _vm = site.start(name, vm.arg(format!("--disk={},{options}", disk.display())));
        let nobody = format!("unix:{}", site.path("nobody").display());
        let refused = command("protect", &site.socket(name), &[&nobody]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        match says {
            Some(why) => assert!(said.contains(why) && said.contains(disk.to_str().unwrap()), "{said}"),
            None => assert!(!said.contains("cannot be protected"), "{said}"),
        }
        assert!(site.is_running(name));
    }
}

#[test]
fn standby_whose_devices_differ_is_refused_while_the_guest_runs_on() {
    in_own_network("standby_whose_devices_differ_is_refused_while_the_guest_runs_on", || {
        let site = Site::new();
        let _primary = run(&site, "a", &[]);
        // The VM's name determines the card's address, so the cards differ.
        let _standby = run(&site, "b", &["--incoming=defer", "--name=other"]);
        let refused = site.protect("a", "b", &[]).status().unwrap();
        assert_eq!(refused.code(), Some(1), "{}", site.protect_said());
        assert!(site.is_running("a"));
        // The standby may report its reason a moment later.
        wait("the standby's reason", || {
            site.ask("b", "query-migrate").to_string().contains("network card 0")
        });
    });
}

#[test]
fn disk_at_its_limit_goes_on_with_the_checkpoints_that_it_asks_for() {
    in_own_network("disk_at_its_limit_goes_on_with_the_checkpoints_that_it_asks_for", || {
        // No checkpoint is due for an hour, and one block reaches the limit of an epoch.
        let mut pair =
            Pair::new(&["--checkpoint-delay=3600000", "--set=x-sterna-checkpoint-buffer-size=65536"]);
        let last = *pair.lines("a").last().unwrap_or(&0);
        wait("the guest", || pair.lines("a").last().is_some_and(|number| *number > last + 50));
        pair.primary.kill();
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
        pair.primary.kill();
        wait("the survivor", || pair.is_running("b"));
        pair.protects.wait();
        // The restored host. Its disk has content that no side knows.
        pair.primary = run(&pair.site, "a", &["--incoming=defer"]);
        std::fs::write(pair.path("a.img"), vec![9; ledger::DISK_BYTES as usize]).unwrap();
        pair.protects = Process(pair.site.protect("b", "a", &[]).spawn().unwrap());
        pair.await_checkpoints("a", 20);
        pair.standby.kill();
        wait("the second survivor", || pair.is_running("a"));
        wait("the guest", || pair.lines("a").len() > 2 * ledger::SLOTS as usize);
        let _ = pair.ask("a", "stop");
        ledger::last_on_disk(&pair.disk("a")).unwrap();
        let (heard, _) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] < pair[1]));
    });
}

#[test]
fn survivor_is_protected_by_a_third_host_and_nothing_that_was_heard_is_missing() {
    in_own_network("survivor_is_protected_by_a_third_host_and_nothing_that_was_heard_is_missing", || {
        let mut pair = Pair::new(&[]);
        pair.await_checkpoints("b", 20);
        pair.primary.kill();
        wait("the survivor", || pair.is_running("b"));
        pair.protects.wait();
        let _third = run(&pair.site, "c", &["--incoming=defer"]);
        let mut protects = Process(pair.site.protect("b", "c", &["--channels=2"]).spawn().unwrap());
        pair.await_checkpoints("c", 20);
        assert_eq!(pair.report("c")["contact"]["generation"], 2);

        pair.standby.kill();

        wait("the third host's guest", || pair.is_running("c"));
        protects.wait();
        wait("the guest", || pair.lines("c").len() > 2 * ledger::SLOTS as usize);
        let _ = pair.ask("c", "stop");
        // Over both takeovers, no packet is sent twice, and none leaves that the survivor does not know.
        let (heard, announcements) = pair.ear.heard();
        assert!(heard.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(announcements >= 2, "the card says twice where it is");
        // Each side's first line follows the last one of the previous side, or repeats some that were already
        // printed.
        for (before, after) in [("a", "b"), ("b", "c")] {
            let (before, after) = (pair.lines(before), pair.lines(after));
            assert!(after[0] <= before.last().unwrap() + 2, "{} after {:?}", after[0], before.last());
            assert!(after.windows(2).all(|pair| pair[0] + 1 == pair[1]));
        }
        let (last, printed) =
            (ledger::last_on_disk(&pair.disk("c")).unwrap(), *pair.lines("c").last().unwrap());
        assert!((printed..=printed + 2).contains(&last), "{last} on the disk, {printed} printed");
    });
}
