//! `virsh migrate` between two libvirts through two `sterna relay` processes, with the control connection through them, too.
//!
//! The hosts are namespaces. `/run/libvirt` is a directory of each host, which has another path for the relays.
#![allow(missing_docs)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use sterna_interop::qemu::PATIENCE;
use sterna_interop::ticks::unbroken_serials;
use sterna_interop::{Failure, Libvirt};

use crate::qemu_relay::{Network, Relay};

/// Longer than a control connection without answers lives in these tests, which is four seconds.
const OUTAGE: Duration = Duration::from_secs(7);
/// Bytes of the disk that travels.
const DISK_BYTES: usize = 8 << 20;
const PLAIN: &[&str] = &[];
const PARALLEL: &[&str] = &["--parallel", "--parallel-connections", "2"];
const POSTCOPY: &[&str] = &["--postcopy", "--postcopy-after-precopy"];
const STORAGE: &[&str] =
    &["--copy-storage-all", "--migrate-disks", "vdb", "--disks-uri", "unix:///run/libvirt/nbd.sock"];
const PEER_TO_PEER: &[&str] = &["--p2p"];

/// Two hosts, a relay on each, and the network between them.
struct Hosts {
    source: Libvirt,
    destination: Libvirt,
    network: Network,
    relays: [Relay; 2],
    _shared: tempfile::TempDir,
}

impl Hosts {
    fn start_for(test: &str) -> Result<Option<Self>, Failure> {
        let shared =
            tempfile::Builder::new().prefix("sterna-").tempdir().map_err(|error| error.to_string())?;
        let Some([source, destination]) = Libvirt::pair_for(test, shared.path())? else { return Ok(None) };
        let [here, there] = [&source, &destination].map(|host| host.directory().join("run"));
        let route = |name: &str, socket: &str| format!("{name}=unix:{}", there.join(socket).display());
        let routes = [route("mig", "mig.sock"), route("nbd", "nbd.sock"), route("ctl", "libvirt-sock")];
        let [mig, nbd, ctl] = &routes;
        let listen = ["listen:tcp:127.0.0.1:0", "--route", mig, "--route", nbd, "--route", ctl];
        let far = Relay::start(&listen)?;
        let network = Network::default();
        let port = network.start(&far.address)?;
        let forward = |name: &str| {
            format!("unix:{}=tcp:127.0.0.1:{port}/{name}", here.join(format!("{name}.sock")).display())
        };
        let [mig, nbd, ctl] = ["mig", "nbd", "ctl"].map(forward);
        let near = Relay::start(&["--forward", &mig, "--forward", &nbd, "--forward", &ctl])?;
        near.wait_until_it_says("ctl.sock")?;
        Ok(Some(Self { source, destination, network, relays: [near, far], _shared: shared }))
    }

    /// Starts a guest with a disk of random bytes at the source. Returns the disk's files on both hosts.
    fn create(&self) -> Result<[PathBuf; 2], Failure> {
        let disks = [&self.source, &self.destination].map(|host| host.directory().join("run/travelling.img"));
        for disk in &disks {
            std::fs::write(disk, vec![0; DISK_BYTES]).map_err(|error| error.to_string())?;
        }
        sterna_interop::fill(&disks[0], 7)?;
        let disk = Path::new("/run/libvirt/travelling.img");
        self.source.create_with_disk("web1", "pc", 32, Some(disk))?;
        self.source.wait_for_ticks("web1", 2)?;
        self.source.virsh(&["migrate-setmaxdowntime", "web1", "20000"])?;
        Ok(disks)
    }

    /// Begins `virsh migrate` with further options.
    fn begin(&self, options: &[&str], rate: &str) -> Result<Migration, Failure> {
        let connection = match options.contains(&"--p2p") {
            true => "qemu+unix:///system?socket=/run/libvirt/ctl.sock".to_owned(),
            false => {
                format!("qemu:///system?socket={}", self.source.directory().join("run/ctl.sock").display())
            }
        };
        let fixed = ["-k", "1", "-K", "3", "migrate", "--live", "--unsafe", "--bandwidth", rate];
        let place = ["--migrateuri", "unix:///run/libvirt/mig.sock", "web1", &connection];
        let arguments = [&fixed, options, &place].concat();
        let mut command = self.source.virsh_command(&arguments);
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        Ok(Migration { process: spawned.map_err(|error| format!("virsh: {error}"))? })
    }

    /// The guest runs at the destination, and no tick of it is lost. Ends it.
    fn check_arrived(&self) -> Result<(), Failure> {
        assert_eq!(self.destination.virsh(&["domstate", "web1"])?.trim(), "running");
        assert!(self.source.virsh(&["domstate", "web1"]).is_err(), "the domain is still at the source");
        self.destination.wait_for_ticks("web1", 2)?;
        unbroken_serials(&[&self.destination.serial("web1")])?;
        self.destination.virsh(&["destroy", "web1"])?;
        // The next guest begins to count again.
        std::fs::remove_file(self.destination.serial_file("web1")).map_err(|error| error.to_string())
    }

    fn said(&self) -> String {
        format!("source's relay:\n{}destination's relay:\n{}", self.relays[0].said(), self.relays[1].said())
    }

    /// Waits until the source's relay has reported more of `text` than the `before` times.
    fn wait_for(&self, text: &str, before: usize, migration: &mut Migration) -> Result<(), Failure> {
        let begin = Instant::now();
        while self.count(text) <= before {
            if begin.elapsed() > PATIENCE || migration.has_ended() {
                return Err(format!(
                    "the relay never said {text:?}: {}\n{}",
                    migration.message(),
                    self.said()
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn count(&self, text: &str) -> usize {
        self.relays[0].said().matches(text).count()
    }

    /// Migrates with `options`. At `cut` the network goes away for [`OUTAGE`].
    fn migrate_with_an_outage(&self, options: &[&str], cut: Cut) -> Result<(), Failure> {
        let disks = self.create()?;
        let back = "connected again";
        let before = [cut.text(), back].map(|text| self.count(text));
        let mut migration = self.begin(options, "4")?;
        match cut {
            Cut::After(time) => std::thread::sleep(time),
            Cut::In(phase) => self.wait_for(phase, before[0], &mut migration)?,
        }
        self.network.away(true);
        std::thread::sleep(OUTAGE);
        self.network.away(false);
        while self.count(back) <= before[1] && !migration.has_ended() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // The migration may be over already.
        let _ = self.source.virsh(&["migrate-setspeed", "web1", "1000"]);
        let _ = self.source.virsh(&["migrate-setspeed", "web1", "1000", "--postcopy"]);
        migration.end().map_err(|why| format!("{options:?}, {cut:?}: {why}\n{}", self.said()))?;
        if options == STORAGE {
            same_content(&disks)?;
        }
        self.check_arrived()
    }
}

/// When the network goes away.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// So long after the begin: while disks are copied.
    After(Duration),
    /// When the source's relay reports this.
    In(&'static str),
}

impl Cut {
    fn text(self) -> &'static str {
        match self {
            Self::After(_) => "no phase",
            Self::In(phase) => phase,
        }
    }
}

/// A running `virsh migrate`.
struct Migration {
    process: Child,
}

impl Migration {
    fn has_ended(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(Some(_)))
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The message of virsh.
    fn end(mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("virsh: {status}: {}", self.message())),
                _ if begin.elapsed() > PATIENCE => return Err("the migration does not end".to_owned()),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// What virsh said, if it has ended.
    fn message(&mut self) -> String {
        let mut said = String::new();
        if self.has_ended()
            && let Some(mut output) = self.process.stderr.take()
        {
            let _ = output.read_to_string(&mut said);
        }
        said
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn same_content(disks: &[PathBuf; 2]) -> Result<(), Failure> {
    let [ours, theirs] = disks.each_ref().map(std::fs::read);
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) if ours == theirs => Ok(()),
        _ => Err("the disk did not arrive".to_owned()),
    }
}

#[test]
fn virsh_migrates_through_relays_in_every_way() -> Result<(), Failure> {
    let test = "virsh_migrates_through_relays_in_every_way";
    let Some(hosts) = Hosts::start_for(test)? else { return Ok(()) };

    for options in [PLAIN, PARALLEL, POSTCOPY, STORAGE, PEER_TO_PEER] {
        let disks = hosts.create()?;
        let end = hosts.begin(options, "1000")?.end();
        end.map_err(|why| format!("{options:?}: {why}\n{}", hosts.said()))?;
        if options == STORAGE {
            same_content(&disks)?;
        }
        hosts.check_arrived()?;
    }
    assert!(
        hosts.relays[0].said().contains("route ctl") && !hosts.relays[0].said().contains("cannot be read")
    );
    Ok(())
}

#[test]
fn virsh_migrates_through_relays_whose_network_is_away_longer_than_its_keep_alive() -> Result<(), Failure> {
    let test = "virsh_migrates_through_relays_whose_network_is_away_longer_than_its_keep_alive";
    let Some(hosts) = Hosts::start_for(test)? else { return Ok(()) };

    // The keep-alive messages are those of virsh, and of the source's daemon.
    for options in [PLAIN, PEER_TO_PEER] {
        hosts.migrate_with_an_outage(options, Cut::In("RAM, round 1"))?;
    }
    Ok(())
}

#[test]
fn migration_that_virsh_aborts_while_the_network_is_away_leaves_the_guest_at_the_source()
-> Result<(), Failure> {
    let test = "migration_that_virsh_aborts_while_the_network_is_away_leaves_the_guest_at_the_source";
    let Some(hosts) = Hosts::start_for(test)? else { return Ok(()) };
    for is_away in [false, true] {
        hosts.create()?;
        let before = hosts.count("RAM, round 1");
        let mut migration = hosts.begin(PLAIN, "1")?;
        hosts.wait_for("RAM, round 1", before, &mut migration)?;
        hosts.network.away(is_away);

        hosts.source.virsh(&["domjobabort", "web1"])?;
        hosts.network.away(false);

        assert!(migration.end().is_err(), "the migration was aborted");
        assert_eq!(hosts.source.virsh(&["domstate", "web1"])?.trim(), "running");
        hosts.source.wait_for_ticks("web1", 2)?;
        unbroken_serials(&[&hosts.source.serial("web1")])?;
        let begin = Instant::now();
        while hosts.destination.virsh(&["domstate", "web1"]).is_ok() {
            assert!(begin.elapsed() < PATIENCE, "the domain is still at the destination: {}", hosts.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        hosts.source.virsh(&["destroy", "web1"])?;
        std::fs::remove_file(hosts.source.serial_file("web1")).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Every way, with an outage in every phase that it has.
#[test]
#[ignore = "three minutes: cargo test -p sterna-interop --test interop outages_in_every_phase -- --ignored"]
fn virsh_migrates_through_relays_with_outages_in_every_phase() -> Result<(), Failure> {
    let test = "virsh_migrates_through_relays_with_outages_in_every_phase";
    let Some(hosts) = Hosts::start_for(test)? else { return Ok(()) };
    for options in [PLAIN, PARALLEL, POSTCOPY, STORAGE, PEER_TO_PEER] {
        let last = if options == POSTCOPY { "postcopy" } else { "end of the stream" };
        // A connection that is closed before the relays have met is a refusal, so the network is never cut there.
        let copying = (options == STORAGE).then_some(Cut::After(Duration::from_millis(1500)));
        for cut in copying.into_iter().chain([Cut::In("RAM, round 1"), Cut::In(last)]) {
            hosts.migrate_with_an_outage(options, cut)?;
        }
    }
    Ok(())
}
