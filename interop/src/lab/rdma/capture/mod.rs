//! Captures connections on the wire. It collects the RoCE packets that a network card of this VM sends and
//! receives, and reassembles their messages.

mod manager;
mod packet;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketType, eth, recv, socket};

use crate::Failure;
use manager::{Reply, Request};
use packet::{Operation, Packet};

/// Room for frames that wait to be read, in bytes. It is larger than the memory of a small guest.
const ROOM_BYTES: usize = 256 << 20;
const LONGEST_FRAME: usize = 16 << 10;
/// The capture is complete after the socket was silent for this time.
const SILENCE: Duration = Duration::from_millis(500);

/// A connection, starting with its request.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) request: Request,
    pub(super) reply: Reply,
    /// Messages of the side that requested the connection.
    pub(super) messages: Vec<Vec<u8>>,
}

/// A running capture, until [`finish`](Self::finish).
pub(super) struct Capture {
    is_over: Arc<AtomicBool>,
    reader: JoinHandle<Result<Vec<Packet>, Failure>>,
}

impl Capture {
    /// Starts a capture on all network cards.
    pub(super) fn start() -> Result<Self, Failure> {
        let failed = |errno: rustix::io::Errno| format!("a socket for packets: {errno}");
        let socket = socket(AddressFamily::PACKET, SocketType::RAW, Some(eth::ALL)).map_err(failed)?;
        set_socket_recv_buffer_size_force(&socket, ROOM_BYTES / 2).map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(SILENCE)).map_err(failed)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let reader = std::thread::spawn(move || read(&socket, &over).map_err(failed));
        Ok(Self { is_over, reader })
    }

    /// Ends the capture and returns the connections in the order of their requests.
    pub(super) fn finish(self) -> Result<Vec<Conversation>, Failure> {
        self.is_over.store(true, Ordering::Relaxed);
        conversations(&self.reader.join().map_err(|_| "capturing panicked")??)
    }
}

fn read(socket: &OwnedFd, is_over: &AtomicBool) -> rustix::io::Result<Vec<Packet>> {
    let (mut packets, mut frame) = (Vec::new(), vec![0; LONGEST_FRAME]);
    loop {
        match recv(socket, &mut frame[..], RecvFlags::empty()) {
            Ok((length, _)) => packets.extend(Packet::of_frame(&frame[..length])),
            Err(rustix::io::Errno::AGAIN) if is_over.load(Ordering::Relaxed) => return Ok(packets),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn conversations(packets: &[Packet]) -> Result<Vec<Conversation>, Failure> {
    let mut directions: BTreeMap<(Ipv4Addr, u32), Direction> = BTreeMap::new();
    let mut requests: Vec<(&Packet, Request)> = Vec::new();
    let mut replies: Vec<(&Packet, Reply)> = Vec::new();
    for packet in packets {
        if packet.operation == Operation::Datagram {
            // A request is sent again if no answer arrives in time.
            if let Some(request) = Request::of(packet)
                && requests.iter().all(|(_, other)| *other != request)
            {
                requests.push((packet, request));
            }
            replies.extend(Reply::of(packet).map(|reply| (packet, reply)));
        } else if packet.operation != Operation::Answer {
            let direction = directions.entry((packet.to, packet.pair)).or_default();
            direction.take(packet).map_err(|why| format!("to {} of {}: {why}", packet.pair, packet.to))?;
        }
    }
    let mut take = |to: Ipv4Addr, pair: u32| directions.remove(&(to, pair)).unwrap_or_default().messages;
    let made = requests.into_iter().filter_map(|(asked, request)| {
        let (answered, reply) =
            replies.iter().find(|(packet, reply)| packet.to == asked.from && reply.id == request.id)?;
        let messages = take(answered.from, reply.pair);
        Some(Conversation { request, reply: reply.clone(), messages })
    });
    Ok(made.collect())
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Direction {
    /// Number of the next packet, after the first one was seen.
    next: Option<u32>,
    part: Vec<u8>,
    messages: Vec<Vec<u8>>,
}

impl Direction {
    fn take(&mut self, packet: &Packet) -> Result<(), Failure> {
        const NUMBERS: u32 = 1 << 24;
        let ahead = packet.number.wrapping_sub(self.next.unwrap_or(packet.number)) % NUMBERS;
        if ahead >= NUMBERS / 2 {
            // The packet was sent again.
            return Ok(());
        }
        if ahead > 0 {
            return Err(format!("{ahead} packets before {} were not seen", packet.number));
        }
        self.next = Some((packet.number + 1) % NUMBERS);
        match packet.operation {
            Operation::Send { is_last } => {
                self.part.extend_from_slice(&packet.body);
                if is_last {
                    self.messages.push(std::mem::take(&mut self.part));
                }
                Ok(())
            }
            Operation::Write => Ok(()),
            other => Err(format!("packet {} is {other:?}", packet.number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::packet::tests::frame;
    use super::*;

    fn taken(packets: &[(u8, u32, &[u8])]) -> Result<Direction, Failure> {
        let mut direction = Direction::default();
        for (opcode, number, body) in packets {
            direction.take(&Packet::of_frame(&frame(*opcode, 17, *number, body)).unwrap())?;
        }
        Ok(direction)
    }

    #[test]
    fn messages_are_put_together_of_packets_in_order_each_once() {
        let last = (1 << 24) - 1;
        let direction = taken(&[
            (4, last - 1, b"one"),
            (0, last, b"fir"),
            (6, 0, b""),
            (4, last - 1, b"one"),
            (2, 1, b"st"),
        ])
        .unwrap();

        assert_eq!(direction.messages, [b"one".to_vec(), b"first".to_vec()]);
    }

    #[test]
    fn packet_that_was_not_seen_is_noticed() {
        assert!(taken(&[(4, 5, b"one"), (4, 7, b"two")]).is_err());
    }

    #[test]
    fn connection_has_its_private_data_and_the_messages_of_who_asked() {
        let manager = |kind: u8, fields: &[(usize, &[u8])]| {
            let mut body = vec![0; 8 + 256];
            body[8 + 17] = kind;
            for (at, bytes) in fields {
                body[8 + 24 + at..][..bytes.len()].copy_from_slice(bytes);
            }
            frame(100, 1, 0, &body)
        };
        let request = manager(
            0x10,
            &[
                (0, &[0, 0, 0, 9]),
                (32, &[0, 0, 20, 1, 0, 0, 0, 2]),
                (47, &[0xfd]),
                (50, &[0x7a]),
                (176, b"asked"),
            ],
        );
        let mut reply = manager(0x13, &[(4, &[0, 0, 0, 9]), (12, &[0, 0, 30]), (36, b"answered")]);
        let mut back = frame(4, 20, 7, b"back");
        for frame in [&mut reply, &mut back] {
            (frame[29], frame[33]) = (2, 1);
        }
        let frames = [request.clone(), request, reply, frame(4, 30, 1, b"there"), back];
        let packets: Vec<_> = frames.iter().filter_map(|frame| Packet::of_frame(frame)).collect();

        let [only] = &conversations(&packets).unwrap()[..] else { panic!("not one connection") };
        assert_eq!(only.request.conditions(), [1, 2, 5, 2]);
        assert_eq!((only.request.private_data.len(), &only.request.private_data[..5]), (56, &b"asked"[..]));
        assert_eq!((only.reply.private_data.len(), &only.reply.private_data[..8]), (196, &b"answered"[..]));
        assert_eq!(only.messages, [b"there"]);
    }
}
