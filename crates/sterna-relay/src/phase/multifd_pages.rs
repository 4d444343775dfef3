//! Finds the pages in a multifd channel while it passes.

use sterna_wire::multifd::{InitialPacket, Method, PacketHeader, PacketKind, RAM_PACKET_BYTES};
use sterna_wire::{PAGE_SIZE, limits::PACKET_PAGES};

/// Reads the packets of one channel, from its first byte on, and copies no page.
#[derive(Debug)]
pub struct MultifdPages {
    state: State,
    /// Offset of the next byte.
    at: u64,
    /// The begin of a packet.
    pending: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Initial,
    Packet,
    /// So many bytes of pages follow.
    Pages(usize),
    /// So many other bytes follow.
    Other(usize),
    /// Nothing more is read.
    Deaf,
}

impl Default for MultifdPages {
    fn default() -> Self {
        Self { state: State::Initial, at: 0, pending: Vec::new() }
    }
}

impl MultifdPages {
    /// Reads the next bytes, and appends the offsets at which pages begin.
    pub fn feed(&mut self, mut bytes: &[u8], starts: &mut Vec<u64>) {
        while !bytes.is_empty() && self.state != State::Deaf {
            let used = match &mut self.state {
                State::Initial => self.collect(bytes, InitialPacket::BYTES),
                State::Packet => self.collect(bytes, RAM_PACKET_BYTES),
                State::Pages(left) => {
                    if left.is_multiple_of(PAGE_SIZE) {
                        starts.push(self.at);
                    }
                    let rest = (*left - 1) % PAGE_SIZE + 1;
                    let here = bytes.len().min(rest);
                    *left -= here;
                    here
                }
                State::Other(left) => {
                    let here = bytes.len().min(*left);
                    *left -= here;
                    here
                }
                State::Deaf => return,
            };
            self.at += used as u64;
            bytes = &bytes[used..];
            if let State::Pages(0) | State::Other(0) = self.state {
                self.state = State::Packet;
            }
        }
    }

    /// Collects a packet of `length` bytes. Returns how many bytes it took.
    fn collect(&mut self, bytes: &[u8], length: usize) -> usize {
        let here = bytes.len().min(length - self.pending.len());
        self.pending.extend_from_slice(&bytes[..here]);
        if self.pending.len() == length {
            self.state = match self.state {
                State::Initial => State::Packet,
                _ => payload(&self.pending),
            };
            self.pending.clear();
        }
        here
    }
}

/// What follows a packet.
fn payload(packet: &[u8]) -> State {
    let word = |at: usize| {
        let bytes = packet.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes)) as usize
    };
    // A device's state has packets of another length; the pages are over by then.
    let Ok(Some(PacketHeader { kind: PacketKind::Ram { method, differences, .. } })) =
        PacketHeader::peek(packet)
    else {
        return State::Deaf;
    };
    // Words of specs/stream.md §3.4: normal pages, bytes of the payload.
    match (word(16), word(20)) {
        (0, _) => State::Packet,
        (pages, _) if pages > PACKET_PAGES => State::Deaf,
        (pages, bytes) if method == Method::None && !differences && bytes == pages * PAGE_SIZE => {
            State::Pages(bytes)
        }
        (_, 0) => State::Packet,
        (_, bytes) => State::Other(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(pages: u32, bytes: u32) -> Vec<u8> {
        let mut packet = vec![0; RAM_PACKET_BYTES];
        packet[..12].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 0]);
        packet[12..16].copy_from_slice(&128_u32.to_be_bytes());
        packet[16..20].copy_from_slice(&pages.to_be_bytes());
        packet[20..24].copy_from_slice(&bytes.to_be_bytes());
        packet
    }

    #[test]
    fn pages_are_found_however_the_bytes_arrive() {
        let mut stream = vec![0; InitialPacket::BYTES];
        stream.extend(packet(2, 8192));
        let first = stream.len() as u64;
        stream.extend([1; 8192]);
        stream.extend(packet(0, 8192));
        stream.extend(packet(1, 4096));
        let third = stream.len() as u64;
        stream.extend([2; 4096]);
        for piece in [1, 7, 1000, 4096, 5000, stream.len()] {
            let (mut reader, mut starts) = (MultifdPages::default(), Vec::new());
            stream.chunks(piece).for_each(|bytes| reader.feed(bytes, &mut starts));
            assert_eq!(starts, [first, first + 4096, third], "pieces of {piece} bytes");
        }
    }

    #[test]
    fn bytes_that_are_no_packet_have_no_pages() {
        let (mut reader, mut starts) = (MultifdPages::default(), Vec::new());
        reader.feed(&vec![0x55; 100_000], &mut starts);
        assert_eq!((reader.state, starts.len()), (State::Deaf, 0));
    }
}
