//! A network that breaks a clause of the page order on behalf of the engine. It decodes the packets of multifd
//! channels, and forwards them in the order of an engine without the clause.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::delay::{Carrier, as_it_comes};
use sterna::ram::PAGE_SIZE;

/// The change to the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// No change.
    Sound,
    /// Clause 1: pages of one round are sent again, with their old content, at the end of the next round.
    PagesTwice,
    /// Clause 5: a channel's SYNC overtakes the packet before it.
    SyncTooEarly,
}

/// Bytes before the first packet (specs/stream.md §3.2).
const INITIAL_BYTES: usize = 64;
/// Bytes of a packet without its pages (specs/stream.md §3.4).
const PACKET_BYTES: usize = 320 + 8 * 128;
const SYNC: u32 = 1;
/// Time from a SYNC until the overtaken packet is sent.
const OVERTAKEN_BY: Duration = Duration::from_millis(60);

impl Wire {
    /// Creates the carrier of connection `index`. The main channel, which connects first, is not changed.
    pub fn carriers(self) -> impl Fn(usize) -> Carrier {
        // One counter for all channels, as in the source.
        let numbers = Arc::new(AtomicU64::new(0));
        move |index| {
            let numbers = Arc::clone(&numbers);
            match self {
                Self::PagesTwice if index > 0 => {
                    Box::new(move |from, send| carry(from, send, Twice { numbers, ..Twice::default() }))
                }
                Self::SyncTooEarly if index > 0 => {
                    Box::new(|from, send| carry(from, send, Overtaken::default()))
                }
                _ => Box::new(as_it_comes),
            }
        }
    }
}

/// A packet with its pages.
struct Packet(Vec<u8>);

impl Packet {
    fn read(from: &mut TcpStream) -> Option<Self> {
        let mut bytes = vec![0; PACKET_BYTES];
        from.read_exact(&mut bytes).ok()?;
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let (normal, payload) = (word(16), word(20));
        assert_eq!(payload, normal * PAGE_SIZE, "pages are sent as they are");
        bytes.resize(PACKET_BYTES + payload, 0);
        from.read_exact(&mut bytes[PACKET_BYTES..]).ok()?;
        Some(Self(bytes))
    }

    fn is_sync(&self) -> bool {
        u32::from_be_bytes(self.0[8..12].try_into().unwrap()) & SYNC != 0
    }

    fn with_number(&self, numbers: &AtomicU64) -> Vec<u8> {
        let mut bytes = self.0.clone();
        bytes[24..32].copy_from_slice(&numbers.fetch_add(1, Ordering::SeqCst).to_be_bytes());
        bytes
    }
}

/// Forwards packets. Returns false after the receiver has closed.
trait Order: Send {
    fn packet(&mut self, packet: Packet, send: &dyn Fn(Vec<u8>) -> bool) -> bool;
    fn end(&mut self, send: &dyn Fn(Vec<u8>) -> bool);
}

fn carry(mut from: TcpStream, send: &dyn Fn(Vec<u8>) -> bool, mut order: impl Order) {
    let mut initial = vec![0; INITIAL_BYTES];
    if from.read_exact(&mut initial).is_err() || !send(initial) {
        return;
    }
    while let Some(packet) = Packet::read(&mut from) {
        if !order.packet(packet, send) {
            return;
        }
    }
    order.end(send);
}

/// Implements [`Wire::PagesTwice`].
#[derive(Default)]
struct Twice {
    numbers: Arc<AtomicU64>,
    /// Packets of the previous round, and of this one.
    old: Vec<Packet>,
    new: Vec<Packet>,
}

impl Order for Twice {
    fn packet(&mut self, packet: Packet, send: &dyn Fn(Vec<u8>) -> bool) -> bool {
        if !packet.is_sync() {
            let bytes = packet.with_number(&self.numbers);
            self.new.push(packet);
            return send(bytes);
        }
        // A round without packets replaces nothing.
        let again = if self.new.is_empty() { Vec::new() } else { std::mem::take(&mut self.old) };
        if !self.new.is_empty() {
            self.old = std::mem::take(&mut self.new);
        }
        again.iter().chain([&packet]).all(|packet| send(packet.with_number(&self.numbers)))
    }

    fn end(&mut self, _: &dyn Fn(Vec<u8>) -> bool) {}
}

/// Implements [`Wire::SyncTooEarly`].
#[derive(Default)]
struct Overtaken {
    held: Option<Packet>,
}

impl Order for Overtaken {
    fn packet(&mut self, packet: Packet, send: &dyn Fn(Vec<u8>) -> bool) -> bool {
        if !packet.is_sync() {
            return self.held.replace(packet).is_none_or(|before| send(before.0));
        }
        if !send(packet.0) {
            return false;
        }
        std::thread::sleep(OVERTAKEN_BY);
        self.held.take().is_none_or(|late| send(late.0))
    }

    fn end(&mut self, send: &dyn Fn(Vec<u8>) -> bool) {
        if let Some(last) = self.held.take() {
            send(last.0);
        }
    }
}
