//! The part of a primary's `sterna protect` that these tests need: heartbeats to the standby that can stop.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use sterna_arbiter::{Generation, GuestName, Identity, Spec};
use sterna_interop::Failure;
use sterna_standby::{Protection, Secret};
use sterna_wire::extension::ChannelBinding;
use sterna_wire::replica::{ArbiterIdentity, ArbiterStore, Hello, Message, Role, Session, Terms, Welcome};

/// A lease that suits a host that is busy with other tests.
pub const LEASE: Duration = Duration::from_secs(4);

pub struct Heart {
    socket: UnixStream,
    is_frozen: Arc<AtomicBool>,
    gives: Arc<AtomicBool>,
    words: Arc<Mutex<Vec<Message>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Heart {
    /// Greets the standby at `path`, and starts the heartbeats. Reports `arbiter` as its arbiter.
    pub fn begin(
        path: &Path,
        protection: Protection,
        secret: &Secret,
        arbiter: &str,
    ) -> Result<Self, Failure> {
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
        let mut session = Session::new(Role::Primary, secret, &hello, &welcome, &binding);
        compare_arbiters(&mut socket, &mut session, protection, arbiter)?;
        let (is_frozen, gives) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let words = Arc::<Mutex<Vec<Message>>>::default();
        let beats = std::thread::spawn({
            let (mut session, mut socket) = (session.clone(), socket.try_clone().map_err(failed)?);
            let (is_frozen, gives) = (Arc::clone(&is_frozen), Arc::clone(&gives));
            move || {
                for number in 1.. {
                    while is_frozen.load(Ordering::SeqCst) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    let word = match gives.swap(false, Ordering::SeqCst) {
                        true => Message::Give,
                        false => Message::Heartbeat(number),
                    };
                    let mut bytes = Vec::new();
                    let sealed = session.seal(word, &mut bytes);
                    if sealed.is_err() || socket.write_all(&bytes).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        });
        let reads = std::thread::spawn({
            let (mut socket, mut session) = (socket.try_clone().map_err(failed)?, session);
            let (is_frozen, words) = (Arc::clone(&is_frozen), Arc::clone(&words));
            move || {
                let mut bytes = [0; Message::BYTES];
                while socket.read_exact(&mut bytes).is_ok() {
                    match session.open(&bytes) {
                        Ok(Some((Message::Answer { .. }, _))) => {}
                        Ok(Some((word, _))) => words.lock().push(word),
                        _ => break,
                    }
                }
                is_frozen.store(false, Ordering::SeqCst);
            }
        });
        Ok(Self { socket, is_frozen, gives, words, threads: vec![beats, reads] })
    }

    /// Sends the message that gives the guest instead of the next heartbeat.
    pub fn give(&self) {
        self.gives.store(true, Ordering::SeqCst);
    }

    /// Whether the standby has sent this message.
    pub fn has_heard(&self, word: Message) -> bool {
        self.words.lock().contains(&word)
    }

    /// Sends nothing more, like a process that was stopped.
    pub fn freeze(&self) {
        self.is_frozen.store(true, Ordering::SeqCst);
    }
}

/// Sends the arbiter's identity, and reads the standby's.
fn compare_arbiters(
    socket: &mut UnixStream,
    session: &mut Session,
    protection: Protection,
    arbiter: &str,
) -> Result<(), Failure> {
    let spec: Spec = arbiter.parse().map_err(|error| format!("{error}"))?;
    let opened = spec.open(Duration::from_secs(10)).map_err(|error| error.to_string())?;
    let (guest, generation) = (GuestName::of_id(protection.id), Generation::new(protection.generation));
    let store = match opened.arbiter.identity(&guest, generation).map_err(|error| error.to_string())? {
        Identity::Is(token) => ArbiterStore::Token(token),
        _ => ArbiterStore::Nothing,
    };
    let ours = ArbiterIdentity { name: arbiter.to_owned(), store };
    let failed = |error: std::io::Error| format!("the arbiters: {error}");
    let mut bytes = Vec::new();
    session.seal_arbiter(&ours, &mut bytes).map_err(|error| error.to_string())?;
    socket.write_all(&bytes).map_err(failed)?;
    let mut head = [0; ArbiterIdentity::HEAD_BYTES];
    socket.read_exact(&mut head).map_err(failed)?;
    let mut bytes = head.to_vec();
    let rest = ArbiterIdentity::rest_bytes(head).map_err(|error| error.to_string())?;
    bytes.resize(head.len() + rest, 0);
    socket.read_exact(&mut bytes[head.len()..]).map_err(failed)?;
    let read = session.open_arbiter(&bytes).map_err(|error| error.to_string())?;
    let (theirs, _) = read.ok_or("a short word of the arbiter")?;
    if !ours.is_same(&theirs) {
        return Err(format!("two arbiters: {ours:?} and {theirs:?}"));
    }
    Ok(())
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
