//! A guest continues in a new process with the same vhost-user back ends.
//! Other processes serve its disk and its network card. The test observes its packets, its console and its
//! disk.

mod back_ends;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sterna_guests::ledger;

use crate::protect_devices::skip;
use crate::support::protection::{connect, sterna, wait};
use back_ends::{BackEnd, Kind};

struct Moving {
    directory: tempfile::TempDir,
    running: Vec<Child>,
    back_ends: [BackEnd; 2],
    /// Numbers of the received packets.
    packets: Arc<Mutex<Vec<u64>>>,
}

impl Drop for Moving {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Processes that outlive `upgrade`.
        for side in ["b", "c"] {
            if let Some(mut vm) = connect(&self.path(&format!("{side}.qmp"))) {
                let _ = vm.execute("quit", Value::Null);
            }
        }
    }
}

impl Moving {
    /// Starts a guest in process `a`.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        std::fs::write(at.join("ledger"), ledger::image()).unwrap();
        let disk = File::options().read(true).write(true).create_new(true).open(at.join("disk.img")).unwrap();
        disk.set_len(ledger::DISK_BYTES).unwrap();
        let packets = Arc::<Mutex<Vec<u64>>>::default();
        let back_ends = [
            BackEnd::start(&at.join("disk"), Kind::Disk(disk)),
            BackEnd::start(&at.join("card"), Kind::Card(Arc::clone(&packets))),
        ];
        let mut moving = Self { directory, running: Vec::new(), back_ends, packets };
        moving.run("a", &[]);
        wait("the guest", || moving.lines("a").len() > 20);
        moving
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn line(&self, side: &str, ram: &str) -> Vec<String> {
        let path = |name: &str| self.path(name).display().to_string();
        vec![
            "run".to_owned(),
            "--machine=kvm".to_owned(),
            format!("--ram={ram}"),
            format!("--guest=flat:{}", path("ledger")),
            format!("--vhost-user={},kind=blk", path("disk")),
            format!("--vhost-user={},kind=net", path("card")),
            format!("--serial={}", path(&format!("{side}.out"))),
            format!("--qmp=unix:{}", path(&format!("{side}.qmp"))),
        ]
    }

    fn run(&mut self, side: &str, more: &[&str]) {
        let mut run = sterna();
        run.args(self.line(side, "64M")).args(more);
        run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.running.push(run.spawn().unwrap());
        wait("the monitor", || connect(&self.path(&format!("{side}.qmp"))).is_some());
    }

    fn ask(&self, side: &str, command: &str, arguments: Value) -> Value {
        connect(&self.path(&format!("{side}.qmp"))).unwrap().execute(command, arguments).unwrap()
    }

    fn upgrade(&self, from: &str, to: &str, ram: &str) -> Output {
        let mut upgrade = sterna();
        upgrade.arg("upgrade").arg(self.path(&format!("{from}.qmp"))).arg("--");
        upgrade.arg(env!("CARGO_BIN_EXE_sterna")).args(self.line(to, ram)).output().unwrap()
    }

    /// The numbers that the guest has printed at that side, from complete lines.
    fn lines(&self, side: &str) -> Vec<u64> {
        let text = std::fs::read_to_string(self.path(&format!("{side}.out"))).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        // The old process may have printed the start of the first line.
        let whole = whole.lines().skip_while(|line| line.len() < 16);
        whole.map(|line| u64::from_str_radix(line, 16).expect("a number")).collect()
    }

    fn goes_on(&self, side: &str, lines: usize) {
        let before = self.lines(side).len();
        wait("the guest", || self.lines(side).len() >= before + lines);
    }

    /// Checks that nothing was lost and nothing was repeated. The guest is stopped in the last of `sides`.
    fn check(&self, sides: &[&str]) {
        let packets = self.packets.lock().unwrap().clone();
        assert_eq!(packets[0], 1);
        assert!(packets.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
        let printed: Vec<_> = sides.iter().map(|side| self.lines(side)).collect();
        for pair in printed.windows(2) {
            let (last, first) = (*pair[0].last().unwrap(), pair[1][0]);
            assert!((last + 1..=last + 2).contains(&first), "{first} after {last}");
        }
        let last = printed.last().unwrap();
        assert!(last.windows(2).all(|pair| pair[0] + 1 == pair[1]));
        let on_disk = ledger::last_on_disk(&std::fs::read(self.path("disk.img")).unwrap()).unwrap();
        let last = *last.last().unwrap();
        assert!((last..=last + 2).contains(&on_disk), "{on_disk} on the disk, {last} printed");
        assert!(self.back_ends.iter().all(|back_end| back_end.connections() == (1, 0)), "one connection");
    }
}

fn kvm(test: &str) -> bool {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            skip(test, format!("/dev/kvm: {error}"));
            false
        }
    }
}

#[test]
fn upgrade_takes_back_ends_along_and_no_request_is_lost() {
    if !kvm("upgrade_takes_back_ends_along_and_no_request_is_lost") {
        return;
    }
    let moving = Moving::new();
    // A new process that is refused leaves the back ends with the old one.
    let refused = moving.upgrade("a", "b", "66M");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    moving.goes_on("a", 50);
    let _ = std::fs::remove_file(moving.path("b.out"));

    for (from, to) in [("a", "b"), ("b", "c")] {
        let upgraded = moving.upgrade(from, to, "64M");
        assert!(upgraded.status.success(), "{upgraded:?}");
        // The guest rewrites its whole disk, and checks the old content before each write.
        moving.goes_on(to, 2 * ledger::SLOTS as usize);
        wait("the old process's end", || connect(&moving.path(&format!("{from}.qmp"))).is_none());
    }
    let _ = moving.ask("c", "stop", Value::Null);

    moving.check(&["a", "b", "c"]);
}

#[test]
fn move_in_steps_takes_back_ends_along_and_a_destination_that_is_killed_does_not() {
    if !kvm("move_in_steps_takes_back_ends_along_and_a_destination_that_is_killed_does_not") {
        return;
    }
    let mut moving = Moving::new();
    let address = format!("unix:{}", moving.path("here").display());
    moving.run("b", &["--same-host", "--incoming", &address]);
    let pause = json!({"capabilities": [{"capability": "pause-before-switchover", "state": true}]});
    let _ = moving.ask("a", "migrate-set-capabilities", pause);
    let _ = moving.ask("a", "migrate-set-parameters", json!({"mode": "cpr-transfer"}));
    let _ = moving.ask("a", "migrate", json!({"uri": address}));
    let status = || moving.ask("a", "query-migrate", Value::Null)["status"].clone();
    wait("the source to wait", || status() == "pre-switchover");
    // The new process has only the connections of the back ends.
    let mut killed = moving.running.pop().unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    wait("the failure", || moving.ask("a", "query-migrate", Value::Null)["status"] == "failed");
    moving.goes_on("a", 50);

    let off = json!({"capabilities": [{"capability": "pause-before-switchover", "state": false}]});
    let _ = moving.ask("a", "migrate-set-capabilities", off);
    let _ = std::fs::remove_file(moving.path("b.out"));
    moving.run("c", &["--same-host", "--incoming", &address]);
    let mut migrate = sterna();
    migrate.arg("migrate").arg(moving.path("a.qmp")).arg(&address).arg("--same-host");
    let migrated = migrate.output().unwrap();
    assert!(migrated.status.success(), "{migrated:?}");
    // The old process exits later, and closes its remaining descriptors.
    let _ = moving.ask("a", "quit", Value::Null);
    let _ = moving.running[0].wait();
    moving.goes_on("c", 2 * ledger::SLOTS as usize);
    let _ = moving.ask("c", "stop", Value::Null);

    moving.check(&["a", "c"]);
}
