//! A network between the two sides that delays each connection by its own time, and may change the bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use sterna::Address;

/// Reads a connection to its end, and sends the bytes that the other side shall receive. The send function returns
/// false after the receiver has closed.
pub type Carrier = Box<dyn FnOnce(TcpStream, &dyn Fn(Vec<u8>) -> bool) + Send>;

/// A [`Carrier`] that changes nothing.
pub fn as_it_comes(mut from: TcpStream, send: &dyn Fn(Vec<u8>) -> bool) {
    let mut bytes = vec![0; 256 << 10];
    while let Ok(read) = from.read(&mut bytes) {
        if read == 0 || !send(bytes[..read].to_vec()) {
            break;
        }
    }
}

/// Forwards connections to `to`. `carriers` creates the carrier of the n-th connection, and `delays[n]` is its delay.
/// The opposite direction is neither delayed nor changed. The threads end with the connections, the listener with the
/// process.
pub fn network(
    to: &Address,
    delays: Vec<Duration>,
    carriers: impl Fn(usize) -> Carrier + Send + 'static,
) -> Address {
    let Address::Tcp { host, port } = to else { panic!("{to} is not TCP") };
    let to = (host.clone(), *port);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its number").port();
    std::thread::spawn(move || {
        for (index, from) in listener.incoming().take(delays.len()).enumerate() {
            let from = from.expect("a connection");
            let Ok(onward) = TcpStream::connect((to.0.as_str(), to.1)) else { break };
            let back = (onward.try_clone().unwrap(), from.try_clone().unwrap());
            forward(back.0, back.1, Duration::ZERO, Box::new(as_it_comes));
            forward(from, onward, delays[index], carriers(index));
        }
    });
    Address::Tcp { host: "127.0.0.1".into(), port }
}

fn forward(from: TcpStream, to: TcpStream, delay: Duration, carrier: Carrier) {
    let (queue, due) = channel();
    std::thread::spawn(move || deliver(to, &due));
    std::thread::spawn(move || carrier(from, &|bytes| queue.send((Instant::now() + delay, bytes)).is_ok()));
}

fn deliver(mut to: TcpStream, due: &Receiver<(Instant, Vec<u8>)>) {
    for (at, bytes) in due {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            // The receiver has closed, so the sender's connection is closed, too.
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
