//! libvirt's control connection: its packets, and its keep-alive messages (`specs/libvirt-rpc.md §1`).
//!
//! Both ends close a control connection on which nothing arrives for half a minute. While the other relay is away, each relay
//! therefore answers the keep-alive messages of its own end. An answer may stand only between two packets, so a packet is passed
//! on when it is complete.

/// Bytes of a packet's length and head.
const HEAD_BYTES: usize = 28;
/// Largest packet, in bytes.
const PACKET_BYTES: usize = (32 << 20) + 4;
/// Larger packets are passed on in parts. libvirt's are far smaller, except for the content of volumes.
const HELD_BYTES: usize = 1 << 20;
/// Bytes that tell whether a connection is libvirt's: a packet's length and program.
const FIRST_BYTES: usize = 8;
const KEEP_ALIVE: u32 = 0x6b65_6570;
const PING: u32 = 1;
/// libvirt's functions, those for QEMU and LXC, and keep-alive.
const PROGRAMS: [u32; 4] = [0x2000_8086, 0x2000_8087, 0x0008_4a55, KEEP_ALIVE];

/// The answer to one keep-alive message: a message of program keep-alive, version 1, procedure 2.
pub const PONG: [u8; HEAD_BYTES] =
    [0, 0, 0, 28, 0x6b, 0x65, 0x65, 0x70, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0];

/// Whether the client of a connection that begins with these bytes speaks libvirt's RPC. None: more bytes are needed.
pub fn is_control(first: &[u8]) -> Option<bool> {
    match first.first_chunk::<FIRST_BYTES>() {
        Some(_) => Some(length_of(first).is_some()),
        // No packet has 16 MiB or more as its first one.
        None if first.first().is_some_and(|byte| *byte != 0) => Some(false),
        None => None,
    }
}

/// Length of the packet that begins with these bytes. None: they are no packet.
fn length_of(bytes: &[u8]) -> Option<usize> {
    let word = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
    let (length, program) = (word(0)? as usize, word(4)?);
    ((HEAD_BYTES..=PACKET_BYTES).contains(&length) && PROGRAMS.contains(&program)).then_some(length)
}

fn is_ping(packet: &[u8]) -> bool {
    let word =
        |at: usize| packet.get(at..).and_then(<[u8]>::first_chunk).map(|word| u32::from_be_bytes(*word));
    packet.len() == HEAD_BYTES && (word(4), word(12)) == (Some(KEEP_ALIVE), Some(PING))
}

/// One direction of a connection, packet by packet.
#[derive(Debug, Default)]
struct Packets {
    /// The bytes of an incomplete packet.
    held: Vec<u8>,
    /// Bytes that follow of a packet that is not held.
    through: usize,
    /// Bytes of the first packet that were passed on before the stream was known.
    passed: usize,
    /// The bytes are not packets any more: SASL encrypts them.
    is_lost: bool,
}

impl Packets {
    /// Takes bytes, and appends complete packets to `pass`. Without `pings`, keep-alive messages are left out. Returns how many.
    fn take(&mut self, bytes: &[u8], pings: bool, pass: &mut Vec<u8>) -> usize {
        self.held.extend_from_slice(bytes);
        let (mut at, mut left_out, before) = (0, 0, pass.len());
        while at < self.held.len() {
            let here = &self.held[at..];
            if self.is_lost || self.through > 0 {
                let count = if self.is_lost { here.len() } else { self.through.min(here.len()) };
                pass.extend_from_slice(&here[..count]);
                self.through = self.through.saturating_sub(count);
                at += count;
                continue;
            }
            if here.len() < FIRST_BYTES {
                break;
            }
            match length_of(here) {
                None => self.is_lost = true,
                Some(length) if length > HELD_BYTES => self.through = length,
                Some(length) => {
                    let Some(packet) = here.get(..length) else { break };
                    if !pings && self.passed == 0 && is_ping(packet) {
                        left_out += 1;
                    } else {
                        pass.extend_from_slice(packet);
                    }
                    at += length;
                }
            }
        }
        self.held.drain(..at);
        let again = self.passed.min(pass.len() - before);
        pass.drain(before..before + again);
        self.passed -= again;
        left_out
    }
}

impl Packets {
    /// The kept bytes that were not passed on.
    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held).split_off(std::mem::take(&mut self.passed))
    }
}

/// A flow at one relay, as far as it may be libvirt's control connection.
#[derive(Debug)]
pub struct Control {
    state: State,
    /// Whether this relay's end is the client.
    is_client_here: bool,
}

#[derive(Debug)]
enum State {
    /// With the first bytes of the client, which do not tell yet. They are passed on, because a client may wait for the answer to them.
    Unknown(Vec<u8>),
    Off,
    On {
        from_here: Packets,
        to_here: Packets,
    },
}

impl Control {
    /// A flow of which nothing is known.
    pub fn new(is_client_here: bool) -> Self {
        Self { state: State::Unknown(Vec::new()), is_client_here }
    }

    /// Whether it is not libvirt's: bytes pass as they are.
    pub fn is_off(&self) -> bool {
        matches!(self.state, State::Off)
    }

    /// Takes bytes of this relay's end, and appends those for the other relay to `pass`. If that one `is_away`, keep-alive messages
    /// are left out. Returns how many: the end gets so many [`PONG`]s.
    pub fn taken(&mut self, bytes: &[u8], is_away: bool, pass: &mut Vec<u8>) -> usize {
        self.learn(bytes, self.is_client_here);
        match &mut self.state {
            State::On { from_here, .. } => from_here.take(bytes, !is_away, pass),
            State::Off | State::Unknown(_) => {
                pass.extend(bytes);
                0
            }
        }
    }

    /// Takes bytes of the other relay, and appends those that this relay's end gets now to `pass`.
    pub fn arrived(&mut self, bytes: &[u8], pass: &mut Vec<u8>) {
        self.learn(bytes, !self.is_client_here);
        match &mut self.state {
            State::On { to_here, .. } => {
                to_here.take(bytes, true, pass);
            }
            State::Off | State::Unknown(_) => pass.extend(bytes),
        }
    }

    /// Whether this relay's end may get a [`PONG`] now: it has no part of a packet.
    pub fn may_answer(&self) -> bool {
        matches!(&self.state, State::On { to_here, .. } if (to_here.through, to_here.passed) == (0, 0) && !to_here.is_lost)
    }

    /// The kept bytes of this relay's end, at the end of its direction.
    pub fn rest_of_taken(&mut self) -> Vec<u8> {
        let State::On { from_here, .. } = &mut self.state else { return Vec::new() };
        from_here.rest()
    }

    /// The kept bytes for this relay's end, at the end of their direction.
    pub fn rest_of_arrived(&mut self) -> Vec<u8> {
        let State::On { to_here, .. } = &mut self.state else { return Vec::new() };
        to_here.rest()
    }

    /// Finds out what the flow is, by the client's first bytes, of which `bytes` are the next ones.
    fn learn(&mut self, bytes: &[u8], is_of_client: bool) {
        let State::Unknown(first) = &mut self.state else { return };
        if !is_of_client {
            // libvirt's server never speaks before it has a call.
            self.state = State::Off;
            return;
        }
        let passed = first.len();
        first.extend_from_slice(bytes);
        let Some(is_control) = is_control(first) else { return };
        if !is_control {
            self.state = State::Off;
            return;
        }
        let held = first[..passed].to_vec();
        let of_client = Packets { held, passed, ..Packets::default() };
        let (from_here, to_here) = match self.is_client_here {
            true => (of_client, Packets::default()),
            false => (Packets::default(), of_client),
        };
        self.state = State::On { from_here, to_here };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(program: u32, procedure: u32, body: usize) -> Vec<u8> {
        let words = [(HEAD_BYTES + body) as u32, program, 1, procedure, 0, 1, 0];
        let mut packet: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        packet.resize(HEAD_BYTES + body, 7);
        packet
    }

    fn ping() -> Vec<u8> {
        packet(KEEP_ALIVE, PING, 0)
    }

    #[test]
    fn pings_are_answered_only_while_the_other_relay_is_away_however_the_bytes_arrive() {
        let stream =
            [packet(0x2000_8086, 66, 0), ping(), packet(0x2000_8087, 1, 100), ping(), ping()].concat();
        let without = [packet(0x2000_8086, 66, 0), packet(0x2000_8087, 1, 100)].concat();
        for size in [1, 3, 7, 28, 29, 64, stream.len()] {
            for (is_away, passes, answered) in [(false, &stream, 0), (true, &without, 3)] {
                let mut control = Control::new(true);
                let (mut pass, mut pings) = (Vec::new(), 0);
                for part in stream.chunks(size) {
                    pings += control.taken(part, is_away, &mut pass);
                }
                assert_eq!((&pass, pings), (passes, answered), "{size} {is_away}");
                assert!(control.rest_of_taken().is_empty());
            }
        }
    }

    #[test]
    fn end_gets_whole_packets_so_that_an_answer_never_splits_one() {
        let stream = [packet(0x2000_8086, 1, 10), packet(0x2000_8086, 23, 3000), PONG.to_vec()].concat();
        let mut control = Control::new(true);
        control.taken(&packet(0x2000_8086, 66, 0), false, &mut Vec::new());
        let mut pass = Vec::new();
        for byte in &stream {
            let before = pass.len();
            control.arrived(&[*byte], &mut pass);
            assert!(control.may_answer());
            assert!([0, 38, 3028, 28].contains(&(pass.len() - before)));
        }
        assert_eq!(pass, stream);
    }

    #[test]
    fn large_packet_passes_in_parts_and_is_not_split_by_an_answer() {
        let mut control = Control::new(false);
        let mut pass = Vec::new();
        control.arrived(&packet(0x2000_8086, 1, 0), &mut pass);
        assert!(control.may_answer());
        let large = packet(0x2000_8086, 209, HELD_BYTES);
        control.arrived(&large[..100], &mut pass);
        assert_eq!((pass.len(), control.may_answer()), (HEAD_BYTES + 100, false));
        control.arrived(&large[100..], &mut pass);
        assert_eq!((pass.len(), control.may_answer()), (HEAD_BYTES + large.len(), true));
    }

    #[test]
    fn other_streams_pass_as_they_are() {
        for stream in [
            &b"QEVM\0\0\0\x03 more"[..],
            b"\x11\x22\x33\x44\0\0\0\x01",
            b"\0\0\0\0\0\x0c\0\x08\x06pc.ram",
            b"\x16\x03\x01",
        ] {
            let mut control = Control::new(true);
            let mut pass = Vec::new();
            for byte in stream {
                assert_eq!(control.taken(&[*byte], true, &mut pass), 0);
            }
            assert_eq!(pass, stream);
            assert!(control.is_off() && !control.may_answer());
        }
        // NBD's server speaks first, and its client's first bytes are 0.
        let mut control = Control::new(true);
        let mut pass = Vec::new();
        control.arrived(b"NBDMAGIC", &mut pass);
        control.taken(&[0, 0, 0, 3], true, &mut pass);
        assert_eq!(pass, b"NBDMAGIC\0\0\0\x03");
    }

    #[test]
    fn encrypted_bytes_after_packets_pass_as_they_are() {
        let mut control = Control::new(true);
        let mut pass = Vec::new();
        let stream = [packet(0x2000_8086, 66, 0), vec![0xa5; 100], ping()].concat();
        for part in stream.chunks(9) {
            assert_eq!(control.taken(part, true, &mut pass), 0);
        }
        assert_eq!(pass, stream);
    }

    #[test]
    fn kept_bytes_pass_at_the_end_of_the_direction() {
        let mut control = Control::new(true);
        let mut pass = Vec::new();
        let packet = packet(0x2000_8086, 66, 0);
        control.taken(&packet[..5], false, &mut pass);
        assert_eq!(pass, packet[..5], "a client may wait for the answer to its first bytes");
        control.taken(&packet[5..20], false, &mut pass);
        pass.extend(control.rest_of_taken());
        assert_eq!(pass, packet[..20]);
    }
}
