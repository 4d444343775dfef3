//! Two relays, and two QEMUs that migrate a running guest.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::clock::CpuClock;
use sterna_benches::forwarder::Forwarder;
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Peer;
use sterna_interop::Guest;

/// Memory that the guest writes: from 1 MiB on.
const WRITTEN_BYTES: u64 = 16 << 20;
/// Bytes at the end of RAM, where firmware has its tables.
const FIRMWARE_BYTES: u64 = 16 << 20;
const PIECE_BYTES: u64 = 1 << 20;

/// A `sterna relay` process, killed when dropped.
pub(crate) struct Relay {
    process: Child,
    clock: CpuClock,
    /// The address at which it listens.
    pub(crate) address: String,
    said: Arc<Mutex<String>>,
}

impl Relay {
    pub(crate) fn start(lab: &Lab, arguments: &[String]) -> Result<Self, Failure> {
        let mut command = match &lab.namespace {
            None => Command::new(&lab.sterna),
            Some(name) => {
                let mut inside = Command::new("ip");
                inside.args(["netns", "exec", name]).arg(&lab.sterna);
                inside
            }
        };
        command
            .arg("relay")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|error| format!("sterna relay: {error}"))?;
        let mut lines = BufReader::new(process.stderr.take().ok_or("no output")?).lines();
        let first = lines.next().ok_or("the relay ended")?.map_err(|error| error.to_string())?;
        let said = Arc::new(Mutex::new(String::new()));
        let collected = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                collected.lock().expect("no panic").push_str(&(line + "\n"));
            }
        });
        let address = first.strip_prefix("sterna: listening at ").ok_or_else(|| first.clone())?.to_owned();
        Ok(Self { clock: CpuClock::of(process.id())?, process, address, said })
    }

    /// CPU time of the process so far.
    pub(crate) fn cpu(&self) -> Duration {
        self.clock.read()
    }

    /// The lines that the process has printed to standard error.
    pub(crate) fn said(&self) -> String {
        self.said.lock().expect("no panic").clone()
    }

    /// The largest resident memory of the process so far, bytes.
    pub(crate) fn most_resident_bytes(&self) -> u64 {
        let about =
            std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = about.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) << 10
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The relays of one migration to `target`. `between` is asked for the address at which the destination's relay is reached.
pub(crate) fn relays(
    lab: &Lab,
    place: &Path,
    target: &str,
    more: (&[String], &[String]),
    between: impl FnOnce(&str) -> Result<String, Failure>,
) -> Result<(Relay, Relay), Failure> {
    let mut arguments =
        vec!["listen:tcp:127.0.0.1:0".to_owned(), "--route".to_owned(), format!("vm={target}")];
    arguments.extend_from_slice(more.1);
    let destination = Relay::start(lab, &arguments)?;
    let to = format!("{}/vm", between(&destination.address)?);
    let listen: PathBuf = place.join("relay");
    let mut arguments = vec![format!("listen:unix:{}", listen.display()), "--to".to_owned(), to];
    arguments.extend_from_slice(more.0);
    Ok((Relay::start(lab, &arguments)?, destination))
}

/// The relays of one migration, and the network between them, which can be cut. `window`: how long it may be away, in seconds.
pub(crate) fn relays_over_a_network(
    lab: &Lab,
    place: &Path,
    target: &str,
    window: u64,
) -> Result<(Relay, Forwarder, Relay), Failure> {
    let window = ["--reconnect-window".to_owned(), window.to_string()];
    let mut network = None;
    let (source, destination) = relays(lab, place, target, (&window, &window), |address| {
        let port = address.rsplit(':').next().and_then(|port| port.parse().ok()).ok_or("no port")?;
        let made = Forwarder::to(port)?;
        let address = made.address();
        network = Some(made);
        Ok(address)
    })?;
    Ok((source, network.ok_or("no network")?, destination))
}

/// A QEMU with a running guest, and a QEMU that waits for it.
pub(crate) struct Pair {
    pub(crate) source: Peer,
    pub(crate) destination: Peer,
}

impl Pair {
    /// The guest rewrites 8 MiB all the time; the rest of RAM is random bytes.
    pub(crate) fn begin(lab: &Lab, bytes: u64) -> Result<Self, Failure> {
        let guest = (Guest::Boot, WRITTEN_BYTES);
        let mut source = lab.start_guest(Side::Qemu, Role::Source, bytes, guest)?;
        let mut destination = lab.start_guest(Side::Qemu, Role::Destination, bytes, guest)?;
        fill(&source, bytes)?;
        for peer in [&mut source, &mut destination] {
            let on = ["events", "return-path"].map(|name| json!({"capability": name, "state": true}));
            peer.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
            peer.execute("migrate-set-parameters", json!({"max-bandwidth": 0, "downtime-limit": 300}))?;
            peer.forget_events()?;
        }
        Ok(Self { source, destination })
    }

    /// Starts the guest, and lets the destination start it when it arrives.
    pub(crate) fn run(&mut self) -> Result<(), Failure> {
        self.destination.execute("cont", Value::Null)?;
        self.source.execute("cont", Value::Null)?;
        self.source.wait_for_ticks(1)
    }

    /// Lets the destination wait at a Unix socket. Returns the address.
    pub(crate) fn listen_on_unix(&mut self) -> Result<String, Failure> {
        let address = format!("unix:{}", self.destination.directory().join("incoming").display());
        self.destination.execute("migrate-incoming", json!({ "uri": address }))?;
        Ok(address)
    }

    /// Migrates to `uri`, and waits for the end of both sides.
    pub(crate) fn migrate(&mut self, uri: &str) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.source.execute("migrate", json!({ "uri": uri }))?;
        self.source.wait_until_completed()?;
        self.destination.wait_until_completed()?;
        Ok(began.elapsed())
    }
}

fn fill(peer: &Peer, bytes: u64) -> Result<(), Failure> {
    let ram = peer.ram()?.into_iter().next().ok_or("a machine without memory files")?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; PIECE_BYTES as usize];
    for at in (WRITTEN_BYTES + PIECE_BYTES..bytes - FIRMWARE_BYTES).step_by(PIECE_BYTES as usize) {
        random.fill(&mut piece);
        ram.write_all_at(&piece, at).map_err(|error| format!("guest RAM: {error}"))?;
    }
    Ok(())
}
