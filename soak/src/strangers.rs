//! Strangers: connections to the destination that belong to no migration.

use std::io::Write;
use std::net::TcpStream;

use sterna::Address;

/// The first bytes of strangers: none, a port scanner's, TLS, a main channel that never goes on, and multifd
/// channels (magic, version, UUID, id: 64 bytes in all) that are cut off, or whole and of another migration.
const GREETINGS: [&[u8]; 7] = [
    b"",
    b"GET / HTTP/1.0\r\n\r\n",
    &[0x16, 3, 1, 2, 0],
    b"QEVM",
    b"QEVM\0\0\0\x03\xff\xff\xff\xff",
    &[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1],
    &FOREIGN_CHANNEL,
];

/// A multifd channel's whole first packet, with a UUID that no guest of the soak has, and id 0.
const FOREIGN_CHANNEL: [u8; 64] = {
    let mut packet = [0; 64];
    let (magic, mut at) = ([0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1], 0);
    while at < 24 {
        packet[at] = if at < 8 { magic[at] } else { 0xee };
        at += 1;
    }
    packet
};

/// Connects several strangers to `to`, in an order that `seed` decides. They stay as long as what is returned.
///
/// # Errors
/// If the address is none of TCP. A destination that listens no more has no strangers.
pub(crate) fn connect(to: &Address, seed: u64) -> Result<Vec<TcpStream>, String> {
    let Address::Tcp { host, port } = to else { return Err(format!("strangers cannot come to {to}")) };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut strangers = Vec::new();
    for _ in 0..2 * GREETINGS.len() {
        let greeting = GREETINGS[random.usize(..GREETINGS.len())];
        let Ok(mut stranger) = TcpStream::connect((host.as_str(), *port)) else { break };
        // Turned away while it speaks, perhaps.
        let _ = stranger.write_all(greeting);
        strangers.push(stranger);
    }
    Ok(strangers)
}
