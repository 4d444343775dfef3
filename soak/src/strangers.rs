//! Strangers: connections to the destination that belong to no migration.

use std::io::Write;
use std::net::TcpStream;

use sterna::Address;

/// First bytes of strangers: none, a port scanner's, TLS, a main channel that stops, and multifd channels
/// (magic, version, UUID, id: 64 bytes in total). The latter are cut off, or complete and of another
/// migration.
const GREETINGS: [&[u8]; 7] = [
    b"",
    b"GET / HTTP/1.0\r\n\r\n",
    &[0x16, 3, 1, 2, 0],
    b"QEVM",
    b"QEVM\0\0\0\x03\xff\xff\xff\xff",
    &[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1],
    &FOREIGN_CHANNEL,
];

/// The complete first packet of a multifd channel. It has id 0 and a UUID that no guest of the soak has.
const FOREIGN_CHANNEL: [u8; 64] = {
    let mut packet = [0; 64];
    let (magic, mut at) = ([0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1], 0);
    while at < 24 {
        packet[at] = if at < 8 { magic[at] } else { 0xee };
        at += 1;
    }
    packet
};

/// Connects several strangers to `to`, in an order that `seed` decides. They stay until the returned list is
/// dropped.
///
/// # Errors
/// If the address is not a TCP address. A destination that does not listen any more gets no strangers.
pub(crate) fn connect(to: &Address, seed: u64) -> Result<Vec<TcpStream>, String> {
    let Address::Tcp { host, port } = to else { return Err(format!("strangers cannot come to {to}")) };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut strangers = Vec::new();
    for _ in 0..2 * GREETINGS.len() {
        let greeting = GREETINGS[random.usize(..GREETINGS.len())];
        let Ok(mut stranger) = TcpStream::connect((host.as_str(), *port)) else { break };
        // The destination may close the connection during the write.
        let _ = stranger.write_all(greeting);
        strangers.push(stranger);
    }
    Ok(strangers)
}
