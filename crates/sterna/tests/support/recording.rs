//! A source's stream as bytes: recorded from the engine without a return path, and replayed with changes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use sterna::{Address, Outcome};

use crate::common;

/// Bytes of every channel.
#[derive(Clone)]
pub struct Recording {
    pub main: Vec<u8>,
    /// Bytes of the multifd channels, by id; includes the initial packet.
    pub lanes: Vec<Vec<u8>>,
}

impl Recording {
    /// Records the stream of a paused guest of `machine_type`, over `lanes` multifd channels (0 for none).
    pub fn take(machine_type: &str, lanes: u8) -> Self {
        let (source, _) = super::vms();
        source.is_machine(machine_type);
        Self::of(&source, lanes)
    }

    /// Records the stream of this guest, which is paused and stays paused.
    pub fn of(source: &Arc<super::TestVm>, lanes: u8) -> Self {
        source.guest.pause().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to: Address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let reader = spawn(move || {
            let read = |mut socket: TcpStream| {
                spawn(move || {
                    let mut bytes = Vec::new();
                    socket.read_to_end(&mut bytes).unwrap();
                    bytes
                })
            };
            let threads: Vec<_> = (0..=lanes).map(|_| read(listener.accept().unwrap().0)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let (mut params, mut capabilities) = common::multifd(lanes.max(1));
        params.limits.setup = std::time::Duration::from_secs(10);
        capabilities.multifd = lanes > 0;
        capabilities.return_path = false;
        let migration = super::vm::start(source, &to, &params, capabilities, Arc::new(()));
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        let (mut main, mut rest) = (Vec::new(), vec![Vec::new(); usize::from(lanes)]);
        for bytes in reader.join().unwrap() {
            if bytes.starts_with(b"QEVM") {
                main = bytes;
            } else {
                let id = usize::from(bytes[24]);
                rest[id] = bytes;
            }
        }
        Self { main, lanes: rest }
    }

    /// Offset of the first `pattern` in the main channel.
    pub fn find(&self, pattern: &[u8]) -> usize {
        self.find_after(0, pattern)
    }

    pub fn find_after(&self, from: usize, pattern: &[u8]) -> usize {
        let found = self.main[from..].windows(pattern.len()).position(|window| window == pattern);
        from + found.unwrap_or_else(|| panic!("no {pattern:02x?} in the main channel"))
    }

    /// Packets of a lane, each with its payload. The first includes the initial packet.
    pub fn packets(&self, lane: usize) -> Vec<Vec<u8>> {
        let mut rest = &self.lanes[lane][..];
        let mut packets = Vec::new();
        let mut initial = 64;
        while !rest.is_empty() {
            let payload = u32::from_be_bytes(rest[initial + 20..initial + 24].try_into().unwrap()) as usize;
            let (packet, behind) = rest.split_at(initial + 1344 + payload);
            packets.push(packet.to_vec());
            (rest, initial) = (behind, 0);
        }
        packets
    }

    /// The lane with the most bytes. On a busy machine, another lane may have sent only packets without pages.
    pub fn busiest_lane(&self) -> usize {
        (0..self.lanes.len()).max_by_key(|lane| self.lanes[*lane].len()).expect("a lane")
    }

    /// Inserts bytes into the main channel.
    pub fn insert(&mut self, at: usize, bytes: &[u8]) {
        self.main.splice(at..at, bytes.iter().copied());
    }

    /// Inserts OPEN_RETURN_PATH after the configuration, so that the destination sends SHUT.
    pub fn with_return_path(mut self) -> Self {
        let at = self.find(&[1, 0, 0, 0, 1, 3, b'r', b'a', b'm']);
        self.insert(at, &[8, 0, 1, 0, 0]);
        self
    }

    /// Sends all bytes. Afterwards closes the connections unless `open`.
    pub fn send(&self, to: &Address, open: bool) -> Sent {
        let mut sent = Sent { sockets: Vec::new(), threads: Vec::new() };
        for bytes in std::iter::once(&self.main).chain(&self.lanes) {
            sent.channel(to, bytes.clone(), open);
        }
        sent
    }
}

/// Connections to which bytes are sent. They are closed when this is dropped.
#[derive(Default)]
pub struct Sent {
    sockets: Vec<TcpStream>,
    threads: Vec<JoinHandle<()>>,
}

impl Sent {
    pub fn channel(&mut self, to: &Address, bytes: Vec<u8>, open: bool) {
        let mut socket = TcpStream::connect(("127.0.0.1", super::port(to))).unwrap();
        self.sockets.push(socket.try_clone().unwrap());
        self.threads.push(spawn(move || {
            // A destination that refuses the bytes closes the connection while they are being sent.
            let _ = socket.write_all(&bytes);
            if !open {
                let _ = socket.shutdown(Shutdown::Write);
            }
        }));
    }

    /// Sends the second half after a delay, in which the destination can read the first.
    pub fn channel_in_two(&mut self, to: &Address, bytes: Vec<u8>, half: usize) {
        let mut socket = TcpStream::connect(("127.0.0.1", super::port(to))).unwrap();
        self.sockets.push(socket.try_clone().unwrap());
        self.threads.push(spawn(move || {
            let _ = socket.write_all(&bytes[..half]);
            std::thread::sleep(std::time::Duration::from_millis(300));
            let _ = socket.write_all(&bytes[half..]);
        }));
    }

    /// Sends the second half when the returned sender is used.
    pub fn channel_in_parts(&mut self, to: &Address, bytes: Vec<u8>, half: usize) -> mpsc::Sender<()> {
        let mut socket = TcpStream::connect(("127.0.0.1", super::port(to))).unwrap();
        self.sockets.push(socket.try_clone().unwrap());
        let (go, going) = mpsc::channel();
        self.threads.push(spawn(move || {
            let _ = socket.write_all(&bytes[..half]);
            let _ = going.recv();
            let _ = socket.write_all(&bytes[half..]);
            let _ = socket.shutdown(Shutdown::Write);
        }));
        go
    }

    /// Sends each part after the previous one was sent and `pause` has passed.
    pub fn channel_with_pauses(&mut self, to: &Address, parts: Vec<Vec<u8>>, pause: std::time::Duration) {
        let mut socket = TcpStream::connect(("127.0.0.1", super::port(to))).unwrap();
        self.sockets.push(socket.try_clone().unwrap());
        self.threads.push(spawn(move || {
            for (number, part) in parts.iter().enumerate() {
                if number > 0 {
                    std::thread::sleep(pause);
                }
                let _ = socket.write_all(part);
            }
        }));
    }

    /// Waits until all bytes are written, and the connections are closed as requested.
    pub fn wait(&mut self) {
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }

    /// Bytes that were received on the first connection until its end.
    pub fn returned(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.sockets[0].read_to_end(&mut bytes);
        bytes
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        for socket in &self.sockets {
            let _ = socket.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::Builder::new().name("peer".into()).spawn(work).unwrap()
}
