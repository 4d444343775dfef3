//! A guest with a network card and a disk continues in a new process.
//! Its tap is handed over and its disk is reopened. The test observes its packets, its console and its disk.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use sterna_guests::ledger;

use crate::protect_devices::{Ear, in_own_network};
use crate::support::protection::{connect, sterna, wait};

struct Moving {
    directory: tempfile::TempDir,
    running: Child,
}

impl Drop for Moving {
    fn drop(&mut self) {
        let _ = self.running.kill();
        let _ = self.running.wait();
        // A process that outlives `upgrade`.
        if let Some(mut vm) = connect(&self.path("b.qmp")) {
            let _ = vm.execute("quit", Value::Null);
        }
    }
}

fn line(at: &Path, side: &str, ram: &str) -> Vec<String> {
    let path = |name: String| at.join(name).display().to_string();
    vec![
        "run".to_owned(),
        "--machine=kvm".to_owned(),
        format!("--ram={ram}"),
        format!("--guest=flat:{}", path("ledger".to_owned())),
        format!("--disk={}", path("disk.img".to_owned())),
        "--net=tap:t".to_owned(),
        format!("--serial={}", path(format!("{side}.out"))),
        format!("--qmp=unix:{}", path(format!("{side}.qmp"))),
    ]
}

impl Moving {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        std::fs::write(at.join("ledger"), ledger::image()).unwrap();
        File::create(at.join("disk.img")).unwrap().set_len(ledger::DISK_BYTES).unwrap();
        let running = sterna()
            .args(line(at, "a", "64M"))
            .arg("-S")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let moving = Self { directory, running };
        wait("the monitor", || connect(&moving.path("a.qmp")).is_some());
        assert!(Command::new("ip").args(["link", "set", "dev", "t", "up"]).status().unwrap().success());
        let _ = moving.ask("a", "cont");
        wait("the guest", || moving.lines("a").len() > 20);
        moving
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn ask(&self, side: &str, command: &str) -> Value {
        connect(&self.path(&format!("{side}.qmp"))).unwrap().execute(command, Value::Null).unwrap()
    }

    fn upgrade(&self, ram: &str) -> Output {
        let mut upgrade = sterna();
        upgrade.arg("upgrade").arg(self.path("a.qmp")).arg("--").arg(env!("CARGO_BIN_EXE_sterna"));
        upgrade.args(line(self.directory.path(), "b", ram)).output().unwrap()
    }

    /// The numbers that the guest has printed at that side, from complete lines.
    fn lines(&self, side: &str) -> Vec<u64> {
        let text = std::fs::read_to_string(self.path(&format!("{side}.out"))).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        // The old process may have printed the start of the first line.
        let whole = whole.lines().skip_while(|line| line.len() < 16);
        whole.map(|line| u64::from_str_radix(line, 16).expect("a number")).collect()
    }
}

#[test]
fn card_and_disk_go_on_in_a_new_process_and_no_packet_is_lost() {
    in_own_network("card_and_disk_go_on_in_a_new_process_and_no_packet_is_lost", || {
        let mut ear = Ear::new();
        let moving = Moving::new();
        // A new process that is refused leaves tap and disk with the old one.
        let refused = moving.upgrade("66M");
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let before = moving.lines("a").len();
        wait("the guest, here", || moving.lines("a").len() > before + 50);

        let upgraded = moving.upgrade("64M");
        assert!(upgraded.status.success(), "{upgraded:?}");
        // The guest rewrites its whole disk, and checks the old content before each write.
        wait("the guest, there", || moving.lines("b").len() > 3 * ledger::SLOTS as usize);
        let _ = moving.ask("b", "stop");

        let (heard, announcements) = ear.heard();
        assert_eq!(heard[0], 1);
        assert!(heard.windows(2).all(|pair| pair[0] + 1 == pair[1]), "every packet, once");
        assert!(announcements >= 1, "the card says where it is");
        let (here, there) = (moving.lines("a"), moving.lines("b"));
        let (last, first) = (*here.last().unwrap(), there[0]);
        assert!((last + 1..=last + 2).contains(&first), "{first} after {last}");
        assert!(there.windows(2).all(|pair| pair[0] + 1 == pair[1]));
        let on_disk = ledger::last_on_disk(&std::fs::read(moving.path("disk.img")).unwrap()).unwrap();
        let printed = *there.last().unwrap();
        assert!((printed..=printed + 2).contains(&on_disk), "{on_disk} on the disk, {printed} printed");
    });
}
