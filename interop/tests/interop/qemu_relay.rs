//! Real QEMUs that migrate through two `sterna relay` processes, whose connection breaks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Builder, Failure, Guest, Qemu, Root, sterna, unbroken};

fn builder(root: &Root) -> Builder {
    Qemu::builder(root).machine("pc").memory_mib(64).guest(Guest::Boot)
}

/// A `sterna relay` process. It is killed on drop.
pub struct Relay {
    process: Child,
    pub address: String,
    said: Arc<Mutex<String>>,
}

impl Relay {
    pub fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let mut command: Command = sterna();
        command.arg("relay").args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|error| format!("sterna: {error}"))?;
        let mut lines = BufReader::new(process.stderr.take().ok_or("no output")?).lines();
        let first = lines.next().ok_or("the relay said nothing")?.map_err(|error| error.to_string())?;
        let said = Arc::new(Mutex::new(format!("{first}\n")));
        let collected = Arc::clone(&said);
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| *collected.lock().unwrap() += &format!("{line}\n"));
        });
        let address = first.strip_prefix("sterna: listening at ").ok_or_else(|| first.clone())?.to_owned();
        Ok(Self { process, address, said })
    }

    pub fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub fn wait_until_it_says(&self, text: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        while !self.said().contains(text) {
            if begin.elapsed() > PATIENCE {
                return Err(format!("the relay never said {text:?}: {}", self.said()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A network between the relays that the test cuts.
#[derive(Clone, Default)]
pub struct Network {
    connections: Arc<Mutex<Vec<TcpStream>>>,
    is_away: Arc<AtomicBool>,
}

impl Network {
    /// Listens, and connects each connection to `to`. Returns the port.
    pub fn start(&self, to: &str) -> Result<u16, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        let (network, to) = (self.clone(), to.strip_prefix("tcp:").unwrap_or(to).to_owned());
        std::thread::spawn(move || {
            for one in listener.incoming().map_while(Result::ok) {
                if network.is_away.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(other) = TcpStream::connect(&to) else { continue };
                for (from, to) in [(&one, &other), (&other, &one)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
                    network.connections.lock().unwrap().extend(from.try_clone());
                    std::thread::spawn(move || pump(from, to));
                }
            }
        });
        Ok(port)
    }

    pub fn away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::SeqCst);
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Two relays and the network between them. The source's QEMU migrates to `uri`.
struct Between {
    network: Network,
    source: Relay,
    destination: Relay,
}

fn relays(directory: &Path, target: &str, more: &[&str]) -> Result<Between, Failure> {
    let route = format!("web1={target}");
    let destination = Relay::start(&[&["listen:tcp:127.0.0.1:0", "--route", &route], more].concat())?;
    let network = Network::default();
    let to = format!("tcp:127.0.0.1:{}/web1", network.start(&destination.address)?);
    let listen = format!("listen:unix:{}/relay", directory.display());
    let source = Relay::start(&[&[listen.as_str(), "--to", &to], more].concat())?;
    Ok(Between { network, source, destination })
}

/// Waits until the source has sent so many bytes.
fn wait_for_bytes(source: &mut Qemu, bytes: u64) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let state = source.unfailed_migration()?;
        if state["ram"]["transferred"].as_u64().unwrap_or(0) >= bytes {
            return Ok(());
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("the migration does not proceed: {state}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ready(qemu: &mut Qemu, capabilities: &[&str]) -> Result<(), Failure> {
    qemu.capabilities(&[&["return-path"], capabilities].concat())
}

#[test]
fn relay_carries_a_migration_whose_network_is_cut_in_precopy() -> Result<(), Failure> {
    let test = "relay_carries_a_migration_whose_network_is_cut_in_precopy";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for capabilities in [&[][..], &["multifd"]] {
        let mut source = builder(&root).spawn()?;
        source.wait_for_ticks(2)?;
        let mut target = builder(&root).incoming_defer().spawn()?;
        ready(&mut target, capabilities)?;
        ready(&mut source, capabilities)?;
        let address = target.listen_on_unix()?;
        let relays = relays(source.directory(), &address, &[])?;
        // The rest of the guest needs seconds at this rate, so the network is cut before everything is sent.
        source.parameters(json!({"max-bandwidth": 4 << 20, "downtime-limit": 1000}))?;

        source.start_migration(&relays.source.address)?;
        wait_for_bytes(&mut source, 2 << 20)?;
        relays.network.away(true);
        std::thread::sleep(Duration::from_secs(1));
        relays.network.away(false);
        relays.source.wait_until_it_says("connected again")?;
        source.parameters(json!({"max-bandwidth": 0, "downtime-limit": 10_000}))?;
        let state = source.wait_for_migration();

        let said = format!("source: {}destination: {}", relays.source.said(), relays.destination.said());
        let state = state.map_err(|why| format!("{why}\n{said}"))?;
        assert_eq!(state["status"], "completed");
        assert!(said.contains("RAM, round 1"), "{said}");
        target.wait_for_status("running")?;
        target.wait_for_ticks(2)?;
        unbroken(&[&source, &target])?;
        assert_eq!(source.status()?, "postmigrate");
    }
    Ok(())
}

#[test]
fn relay_that_cannot_reconnect_in_precopy_leaves_the_guest_at_the_source() -> Result<(), Failure> {
    let test = "relay_that_cannot_reconnect_in_precopy_leaves_the_guest_at_the_source";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = builder(&root).spawn()?;
    source.wait_for_ticks(2)?;
    let mut target = builder(&root).incoming_defer().spawn()?;
    ready(&mut target, &[])?;
    ready(&mut source, &[])?;
    let address = target.listen_on_unix()?;
    let relays = relays(source.directory(), &address, &["--reconnect-window", "1"])?;
    source.parameters(json!({"max-bandwidth": 8 << 20}))?;

    source.start_migration(&relays.source.address)?;
    wait_for_bytes(&mut source, 2 << 20)?;
    relays.network.away(true);
    relays.source.wait_until_it_says("The guest runs at the source")?;

    assert!(source.wait_for_migration().is_err(), "the migration fails");
    source.wait_for_status("running")?;
    source.wait_for_ticks(2)?;
    unbroken(&[&source])?;
    Ok(())
}

#[test]
fn relay_carries_a_postcopy_migration_with_a_preempt_channel() -> Result<(), Failure> {
    let test = "relay_carries_a_postcopy_migration_with_a_preempt_channel";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let capabilities = ["postcopy-ram", "postcopy-preempt"];
    let mut source = builder(&root).spawn()?;
    source.wait_for_ticks(2)?;
    let mut target = builder(&root).incoming_defer().spawn()?;
    ready(&mut target, &capabilities)?;
    ready(&mut source, &capabilities)?;
    let address = target.listen_on_unix()?;
    let relays = relays(source.directory(), &address, &[])?;
    source.parameters(json!({"max-bandwidth": 4 << 20, "max-postcopy-bandwidth": 4 << 20}))?;

    source.start_migration(&relays.source.address)?;
    wait_for_bytes(&mut source, 1 << 20)?;
    source.execute("migrate-start-postcopy", Value::Null)?;
    relays.source.wait_until_it_says("postcopy")?;
    // In postcopy an outage within the window is invisible to both QEMUs.
    relays.network.away(true);
    std::thread::sleep(Duration::from_millis(500));
    relays.network.away(false);
    source.parameters(json!({"max-postcopy-bandwidth": 0}))?;
    let state = source.wait_for_migration();

    let said = format!("source: {}destination: {}", relays.source.said(), relays.destination.said());
    state.map_err(|why| format!("{why}\n{said}"))?;
    target.wait_for_status("running")?;
    target.wait_for_ticks(2)?;
    unbroken(&[&source, &target])?;
    Ok(())
}

/// The bytes before and after compression, and the references, of the session that ended last.
fn compressed(relay: &Relay) -> Result<[u64; 3], Failure> {
    relay.wait_until_it_says(" as references")?;
    let said = relay.said();
    let line = said.lines().rfind(|line| line.contains(" as references")).unwrap_or_default();
    // "session ID: 123 bytes went as 45, 6 pages of them as references; …"
    let numbers: Vec<u64> =
        line.split([' ', ',']).skip(3).filter_map(|word| word.parse().ok()).take(3).collect();
    numbers.try_into().map_err(|_| format!("the relay said {line:?}"))
}

#[test]
fn relay_compresses_and_sends_the_second_guest_of_an_image_as_references() -> Result<(), Failure> {
    let test = "relay_compresses_and_sends_the_second_guest_of_an_image_as_references";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for capabilities in [&[][..], &["multifd"]] {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let routes = directory.path().display().to_string();
        let destination = Relay::start(&["listen:tcp:127.0.0.1:0", "--route-dir", &routes])?;
        let network = Network::default();
        let port = network.start(&destination.address)?;
        let mut figures = Vec::new();
        for number in 1..=2 {
            let mut source = builder(&root).spawn()?;
            source.wait_for_ticks(2)?;
            let mut target = builder(&root).incoming_defer().spawn()?;
            ready(&mut target, capabilities)?;
            ready(&mut source, capabilities)?;
            let address = target.listen_on_unix()?;
            let socket = address.strip_prefix("unix:").ok_or_else(|| address.clone())?;
            let route = directory.path().join(format!("web{number}"));
            std::fs::hard_link(socket, &route).map_err(|error| format!("{socket}: {error}"))?;
            let listen = format!("listen:unix:{}/relay", source.directory().display());
            let to = format!("tcp:127.0.0.1:{port}/web{number}");
            let relay = Relay::start(&[&listen, "--to", &to, "--compress", "auto"])?;
            source.parameters(json!({"max-bandwidth": 4 << 20, "downtime-limit": 1000}))?;

            source.start_migration(&relay.address)?;
            wait_for_bytes(&mut source, 2 << 20)?;
            network.away(true);
            std::thread::sleep(Duration::from_millis(300));
            network.away(false);
            relay.wait_until_it_says("connected again")?;
            source.parameters(json!({"max-bandwidth": 0, "downtime-limit": 10_000}))?;
            let state = source.wait_for_migration();

            let said = format!("source: {}destination: {}", relay.said(), destination.said());
            let state = state.map_err(|why| format!("{why}\n{said}"))?;
            assert_eq!(state["status"], "completed");
            target.wait_for_status("running")?;
            target.wait_for_ticks(2)?;
            unbroken(&[&source, &target])?;
            figures.push(compressed(&relay)?);
        }
        let [[plain, sent, _], [_, again, references]] = figures[..] else { unreachable!() };
        assert!(sent < plain, "{figures:?}");
        assert!(references > 0 && again < sent, "{figures:?}");
    }
    Ok(())
}
