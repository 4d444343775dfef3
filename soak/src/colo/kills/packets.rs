//! Packets of the primary's guest, and the observer that receives them.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use sterna::{RunState, SourceVm};
use sterna_guests::ProcessGuest;
use sterna_standby::PacketGate;

/// A packet's number, and the guest's steps when it was sent.
pub(super) type Packet = (u64, u64);

/// Sends numbered packets while the guest runs, until the process ends.
pub(super) fn send(
    guest: &Arc<ProcessGuest>,
    gate: &Arc<PacketGate>,
    observer: SocketAddr,
) -> Result<(), String> {
    let socket = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.connect(observer).map(|()| socket));
    let socket = Arc::new(socket.map_err(|error| format!("{observer}: {error}"))?);
    // The network may lose packets, and the observer may have closed its socket.
    let leave = move |packet: &[u8]| drop(socket.send(packet));
    let lane = gate.lane(leave.clone(), || {});
    let guest = Arc::clone(guest);
    std::thread::spawn(move || {
        let mut number = 0_u64;
        loop {
            if guest.run_state() == RunState::Running && lane.has_room() {
                number += 1;
                let packet = format!("{number} {}", guest.progress().total_steps());
                if lane.is_open() { leave(packet.as_bytes()) } else { lane.put(packet.as_bytes()) }
            }
            std::thread::sleep(Duration::from_micros(900));
        }
    });
    Ok(())
}

/// The observer: it receives packets and knows nothing else of the guest.
pub(super) struct Packets {
    address: SocketAddr,
    heard: Arc<Mutex<Result<Vec<Packet>, String>>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Packets {
    pub(super) fn new() -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("an observer's socket: {error}");
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        socket.set_read_timeout(Some(Duration::from_millis(5))).map_err(failed)?;
        let (heard, ends) = (Arc::new(Mutex::new(Ok(Vec::new()))), Arc::<AtomicBool>::default());
        let thread = std::thread::spawn({
            let (heard, ends) = (Arc::clone(&heard), Arc::clone(&ends));
            move || hear(&socket, &heard, &ends)
        });
        Ok(Self { address, heard, ends, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of packets received so far.
    pub(super) fn count(&self) -> usize {
        self.heard.lock().as_ref().map_or(0, Vec::len)
    }

    /// All packets of a process that has ended.
    pub(super) fn end(mut self) -> Result<Vec<Packet>, String> {
        self.join();
        std::mem::replace(&mut *self.heard.lock(), Ok(Vec::new()))
    }

    fn join(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl Drop for Packets {
    fn drop(&mut self) {
        self.join();
    }
}

/// Returns when the socket is empty and no further packet can arrive.
fn hear(socket: &UdpSocket, heard: &Mutex<Result<Vec<Packet>, String>>, ends: &AtomicBool) {
    let mut bytes = [0; 64];
    loop {
        let is_last = ends.load(Ordering::SeqCst);
        match socket.recv(&mut bytes) {
            Ok(length) => note(&mut heard.lock(), &bytes[..length]),
            Err(_) if is_last => return,
            Err(_) => {}
        }
    }
}

fn note(heard: &mut Result<Vec<Packet>, String>, packet: &[u8]) {
    let text = std::str::from_utf8(packet).unwrap_or_default();
    let parsed =
        text.split_once(' ').and_then(|(number, steps)| Some((number.parse().ok()?, steps.parse().ok()?)));
    match (heard.as_mut(), parsed) {
        (Ok(packets), Some(packet)) => packets.push(packet),
        (Ok(_), None) => *heard = Err(format!("{text:?} is no packet of the guest's")),
        (Err(_), _) => {}
    }
}
