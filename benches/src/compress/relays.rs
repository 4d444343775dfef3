//! Two relays on a slow link, and the bytes that they carry.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_benches::Failure;
use sterna_benches::link::Link;

/// Longest time of one stream.
const PATIENCE: Duration = Duration::from_secs(300);

/// A relay process. It is killed on drop.
struct Relay(Child);

/// The relays of one measurement.
pub(crate) struct Relays<'a> {
    link: &'a Link,
    directory: tempfile::TempDir,
    target: UnixListener,
    _processes: [Relay; 2],
}

/// What one stream took.
pub(crate) struct Run {
    /// Bytes on the link.
    pub(crate) bytes: u64,
    /// From the first byte that the source sent to the last one that the destination read.
    pub(crate) seconds: f64,
}

impl<'a> Relays<'a> {
    pub(crate) fn start(sterna: &Path, link: &'a Link, mode: &str, cache: &str) -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(text)?;
        let path = |name: &str| directory.path().join(name).display().to_string();
        let target = UnixListener::bind(path("target")).map_err(text)?;
        let relay = |arguments: &[&str]| -> Result<(Relay, String), Failure> {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", link.name()]).arg(sterna).arg("relay").args(arguments);
            command.args(["--unconfirmed", "--cache", cache]).stdout(Stdio::null()).stderr(Stdio::piped());
            let mut process = command.spawn().map_err(|error| format!("{}: {error}", sterna.display()))?;
            let mut lines = BufReader::new(process.stderr.take().ok_or("no output")?).lines();
            let first = lines.next().ok_or("the relay said nothing")?.map_err(text)?;
            // The pipe must not become full.
            std::thread::spawn(move || lines.for_each(drop));
            let address =
                first.strip_prefix("sterna: listening at ").ok_or_else(|| first.clone())?.to_owned();
            Ok((Relay(process), address))
        };
        let route = format!("guest=unix:{}", path("target"));
        let (destination, address) = relay(&["listen:tcp:127.0.0.1:0", "--route", &route])?;
        let listen = format!("listen:unix:{}", path("source"));
        let (source, _) = relay(&[&listen, "--to", &format!("{address}/guest"), "--compress", mode])?;
        Ok(Self { link, target, directory, _processes: [source, destination] })
    }

    /// Carries a stream as a migration of its own.
    pub(crate) fn carry(&self, stream: &[u8]) -> Result<Run, Failure> {
        let before = self.bytes()?;
        let source = UnixStream::connect(self.directory.path().join("source")).map_err(text)?;
        let (target, _) = self.target.accept().map_err(text)?;
        for end in [&source, &target] {
            end.set_read_timeout(Some(PATIENCE)).map_err(text)?;
            end.set_write_timeout(Some(PATIENCE)).map_err(text)?;
        }
        let began = Instant::now();
        let arrived = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                (&source).write_all(stream)?;
                source.shutdown(Shutdown::Write)
            });
            let arrived = read(&target, stream);
            sender.join().map_err(|_| "the sender panicked".to_owned())?.map_err(text)?;
            arrived
        })?;
        let seconds = began.elapsed().as_secs_f64();
        if !arrived {
            return Err("other bytes arrived than were sent".to_owned());
        }
        target.shutdown(Shutdown::Both).map_err(text)?;
        (&source).read_to_end(&mut Vec::new()).map_err(text)?;
        drop((source, target));
        // The session ends some seconds after its last flow; the next stream begins another one.
        let bytes = self.bytes()? - before;
        std::thread::sleep(Duration::from_secs(3));
        Ok(Run { bytes, seconds })
    }

    /// Bytes that the link has carried.
    fn bytes(&self) -> Result<u64, Failure> {
        let arguments = ["netns", "exec", self.link.name(), "cat", "/proc/net/dev"];
        let output = Command::new("ip").args(arguments).output().map_err(text)?;
        let table = String::from_utf8_lossy(&output.stdout);
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix("lo:"));
        let bytes = line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok());
        bytes.ok_or_else(|| format!("no figures of the loopback: {table}"))
    }
}

/// Reads to the end. Whether it is the stream.
fn read(mut target: &UnixStream, stream: &[u8]) -> Result<bool, Failure> {
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    loop {
        match target.read(&mut buffer).map_err(text)? {
            0 => return Ok(at == stream.len()),
            count if stream.get(at..at + count) != Some(&buffer[..count]) => return Ok(false),
            count => at += count,
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(error: std::io::Error) -> Failure {
    error.to_string()
}
