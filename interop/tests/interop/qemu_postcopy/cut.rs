//! A proxy between `sterna serve` and a QEMU. It breaks on request, or after a number of bytes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Forwards connections to the socket at `to`.
pub struct Cut {
    shared: Arc<Shared>,
    address: String,
}

struct Shared {
    to: PathBuf,
    /// Number of bytes towards the QEMU that may still pass.
    left: Mutex<u64>,
    /// When no bytes are left, connections stall; otherwise they break.
    stalls: AtomicBool,
    is_used_up: AtomicBool,
    open: Mutex<Vec<UnixStream>>,
    /// Connections of an earlier generation carry nothing and stay open.
    generation: AtomicU64,
}

impl Cut {
    /// Listens at `at`, and forwards up to `bytes` bytes.
    pub fn new(at: &Path, to: &str, bytes: u64, stalls: bool) -> std::io::Result<Self> {
        let listener = UnixListener::bind(at)?;
        let shared = Arc::new(Shared {
            to: to.trim_start_matches("unix:").into(),
            left: Mutex::new(bytes),
            stalls: AtomicBool::new(stalls),
            is_used_up: AtomicBool::new(false),
            open: Mutex::default(),
            generation: AtomicU64::default(),
        });
        let ours = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                ours.connect(client);
            }
        });
        Ok(Self { shared, address: format!("unix:{}", at.display()) })
    }

    /// The address to which the client connects.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits until the bytes have passed.
    pub fn wait(&self) {
        while !self.shared.is_used_up.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Closes the open connections. Bytes that a stalled connection withholds are lost.
    pub fn cut(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Stops the open connections without closing them, so that neither side notices. New connections carry
    /// everything.
    pub fn abandon(&self) {
        self.shared.generation.fetch_add(1, Ordering::AcqRel);
        self.allow(u64::MAX);
    }

    /// Allows `bytes` further bytes from now on; then the connection breaks.
    pub fn allow(&self, bytes: u64) {
        let mut left = self.shared.left.lock().unwrap();
        self.shared.is_used_up.store(false, Ordering::Release);
        self.shared.stalls.store(false, Ordering::Release);
        *left = bytes;
    }
}

impl Shared {
    fn connect(self: &Arc<Self>, client: UnixStream) {
        // If no server listens there now, the client's connection is closed as well.
        let Ok(server) = UnixStream::connect(&self.to) else { return };
        let mut open = self.open.lock().unwrap();
        let pump = |from: &UnixStream, to: &UnixStream, is_counted: bool| {
            let (from, to, shared) = (from.try_clone().unwrap(), to.try_clone().unwrap(), Arc::clone(self));
            std::thread::spawn(move || shared.pump(from, to, is_counted));
        };
        pump(&client, &server, true);
        pump(&server, &client, false);
        open.extend([client, server]);
    }

    fn pump(&self, mut from: UnixStream, mut to: UnixStream, is_counted: bool) {
        let mut buffer = [0; 4096];
        let generation = self.generation.load(Ordering::Acquire);
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if is_counted && !self.pass(count as u64) {
                break;
            }
            if self.generation.load(Ordering::Acquire) != generation {
                // The sockets stay open, so that neither side sees an end.
                std::mem::forget((from, to));
                return;
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Whether this number of bytes may pass.
    fn pass(&self, count: u64) -> bool {
        loop {
            let mut left = self.left.lock().unwrap();
            if *left >= count {
                *left -= count;
                return true;
            }
            if !self.stalls.load(Ordering::Acquire) {
                for stream in self.open.lock().unwrap().drain(..) {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                self.is_used_up.store(true, Ordering::Release);
                return false;
            }
            self.is_used_up.store(true, Ordering::Release);
            drop(left);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
