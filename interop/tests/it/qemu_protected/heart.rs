//! What a primary's `sterna protect` says to the standby, as far as these tests need it: heartbeats that can stop.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::replica::{Protection, Secret};
use sterna_interop::Failure;
use sterna_wire::extension::ChannelBinding;
use sterna_wire::replica::{Hello, Message, Role, Session, Terms, Welcome};

/// The lease that a host has which is busy with other tests.
const LEASE: Duration = Duration::from_secs(2);

pub struct Heart {
    socket: UnixStream,
    is_frozen: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Heart {
    /// Greets the standby at `path`, and beats.
    pub fn begin(path: &Path, protection: Protection, secret: &Secret) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| format!("the contact: {error}");
        let mut socket = UnixStream::connect(path).map_err(failed)?;
        let terms = Terms {
            heartbeat_us: 100_000,
            lease_us: LEASE.as_micros() as u32,
            margin_us: 100_000,
            claim_interval_us: 50_000,
            drift_per_mille: 10,
        };
        let binding: ChannelBinding = None;
        let hello = Hello::new(protection.id, protection.generation, true, terms, [1; 16], secret, &binding);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        socket.write_all(&bytes).map_err(failed)?;
        let mut answer = [0; Welcome::BYTES];
        socket.read_exact(&mut answer).map_err(failed)?;
        let (welcome, _) =
            Welcome::decode(&answer).map_err(|error| error.to_string())?.ok_or("a short welcome")?;
        let session = Session::new(Role::Primary, secret, &hello, &welcome, &binding);
        let is_frozen = Arc::new(AtomicBool::new(false));
        let beats = std::thread::spawn({
            let (mut session, mut socket) = (session.clone(), socket.try_clone().map_err(failed)?);
            let is_frozen = Arc::clone(&is_frozen);
            move || {
                for number in 1.. {
                    while is_frozen.load(Ordering::SeqCst) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    let mut bytes = Vec::new();
                    let sealed = session.seal(Message::Heartbeat(number), &mut bytes);
                    if sealed.is_err() || socket.write_all(&bytes).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        });
        let reads = std::thread::spawn({
            let mut socket = socket.try_clone().map_err(failed)?;
            let is_frozen = Arc::clone(&is_frozen);
            move || {
                // What it says is of no matter: only that somebody reads.
                let mut bytes = [0; 4096];
                while socket.read(&mut bytes).is_ok_and(|count| count > 0) {}
                is_frozen.store(false, Ordering::SeqCst);
            }
        });
        Ok(Self { socket, is_frozen, threads: vec![beats, reads] })
    }

    /// Says nothing more, as a process that was stopped.
    pub fn freeze(&self) {
        self.is_frozen.store(true, Ordering::SeqCst);
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.is_frozen.store(false, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
