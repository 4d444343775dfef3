//! Decodes a RoCE packet in an Ethernet frame: RoCE v2 over IPv4 and UDP.

use std::net::Ipv4Addr;

/// The UDP port of RoCE v2.
const PORT: u16 = 4791;
const ETHERNET_BYTES: usize = 14;
const UDP_BYTES: usize = 8;
/// Lengths of each packet's base transport header, and of the checksum at the end.
const BASE_BYTES: usize = 12;
const CHECKSUM_BYTES: usize = 4;
/// Length of the additional header of a datagram.
const DATAGRAM_BYTES: usize = 8;

/// The operation of a packet. Reliable connections have the operations up to 31.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// A part of a message, and whether it is the last.
    Send {
        is_last: bool,
    },
    /// A part of a WRITE.
    Write,
    /// An acknowledgement of received packets.
    Answer,
    /// A datagram, which the connection manager uses.
    Datagram,
    Other(u8),
}

/// One packet with its addresses and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
    /// Number of the destination's queue pair.
    pub(super) pair: u32,
    /// Number of the packet, 24 bits.
    pub(super) number: u32,
    pub(super) operation: Operation,
    /// Payload of a part of a message or of a datagram.
    pub(super) body: Vec<u8>,
}

impl Packet {
    /// The packet in this frame, if there is one.
    pub(super) fn of_frame(frame: &[u8]) -> Option<Self> {
        let ip = frame.get(ETHERNET_BYTES..)?;
        if frame[12..14] != [8, 0] || *ip.get(9)? != 17 {
            return None;
        }
        // The frame may be longer than the IP packet, because short frames are padded.
        let udp = ip.get(usize::from(ip[0] & 15) * 4..usize::from(be16(ip, 2)?))?;
        if be16(udp, 2)? != PORT {
            return None;
        }
        let (base, rest) = udp.get(UDP_BYTES..)?.split_at_checked(BASE_BYTES)?;
        let padding = usize::from(base[1] >> 4 & 3);
        let rest = rest.get(..rest.len().checked_sub(CHECKSUM_BYTES + padding)?)?;
        let operation = match base[0] {
            0 | 1 => Operation::Send { is_last: false },
            2 | 4 => Operation::Send { is_last: true },
            6 | 7 | 8 | 10 => Operation::Write,
            13..=18 => Operation::Answer,
            100 => Operation::Datagram,
            other => Operation::Other(other),
        };
        let body = match operation {
            Operation::Send { .. } => rest,
            Operation::Datagram => rest.get(DATAGRAM_BYTES..)?,
            _ => &[],
        };
        Some(Self {
            from: address(ip, 12)?,
            to: address(ip, 16)?,
            pair: be24(base, 5)?,
            number: be24(base, 9)?,
            operation,
            body: body.to_vec(),
        })
    }
}

fn address(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    bytes.get(at..)?.first_chunk().map(|octets: &[u8; 4]| Ipv4Addr::from(*octets))
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|word| u16::from_be_bytes(*word))
}

pub(super) fn be24(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|[a, b, c]| u32::from_be_bytes([0, *a, *b, *c]))
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_be_bytes(*word))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A frame from 10.10.0.1 to 10.10.0.2.
    pub(in super::super) fn frame(opcode: u8, pair: u32, number: u32, body: &[u8]) -> Vec<u8> {
        let padding = (4 - body.len() % 4) % 4;
        let mut base = vec![opcode, (padding as u8) << 4, 0xff, 0xff, 0];
        base.extend_from_slice(&pair.to_be_bytes()[1..]);
        base.push(0);
        base.extend_from_slice(&number.to_be_bytes()[1..]);
        let length = UDP_BYTES + base.len() + body.len() + padding + CHECKSUM_BYTES;
        let mut frame = vec![2; 12];
        frame.extend_from_slice(&[8, 0, 0x45, 0]);
        frame.extend_from_slice(&(length as u16 + 20).to_be_bytes());
        frame.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 10, 0, 1, 10, 10, 0, 2, 0xc0, 0]);
        frame.extend_from_slice(&PORT.to_be_bytes());
        frame.extend_from_slice(&(length as u16).to_be_bytes());
        frame.extend_from_slice(&[0, 0]);
        frame.extend_from_slice(&base);
        frame.extend_from_slice(body);
        frame.extend_from_slice(&vec![0xee; padding + CHECKSUM_BYTES]);
        frame
    }

    #[test]
    fn parts_of_messages_come_without_headers_padding_and_checksum() {
        let mut bytes = frame(2, 0x1234, 0xfff_fff, b"parts");
        // Short frames are padded.
        bytes.extend_from_slice(&[0; 9]);

        let packet = Packet::of_frame(&bytes).unwrap();
        assert_eq!(packet.body, b"parts");
        assert_eq!(packet.operation, Operation::Send { is_last: true });
        assert_eq!((packet.pair, packet.number), (0x1234, 0xff_ffff));
        assert_eq!([packet.from, packet.to].map(|address| address.octets()[3]), [1, 2]);
    }

    #[test]
    fn other_frames_are_no_packets() {
        let whole = frame(4, 1, 1, b"all");
        let [mut arp, mut tcp, mut port] = [0; 3].map(|_| whole.clone());
        (arp[13], tcp[23], port[37]) = (6, 6, 0);
        for other in [arp, tcp, port] {
            assert_eq!(Packet::of_frame(&other), None);
        }
        for length in 0..whole.len() - 1 {
            assert_eq!(Packet::of_frame(&whole[..length]), None, "{length}");
        }
    }
}
